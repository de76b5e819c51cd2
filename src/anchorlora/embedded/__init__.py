"""Data that comes with the package: the `mini` base model and benchmark, made by the programs in tools/mini."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from anchorlora.errors import UnknownName

PREFIX = "embedded:"


def folder(name: str, part: str) -> Path | None:
    """Return the folder of an embedded base model or benchmark.

    Args:
        name: A name such as "embedded:mini".
        part: "data" or "base_model".

    Returns:
        The folder, or None if `name` does not begin with "embedded:".

    Raises:
        UnknownName: Nothing embedded has this name.

    Example:
        >>> from anchorlora.embedded import folder
        >>> folder("embedded:mini", "data").name
        'data'
        >>> folder("Qwen/Qwen3-8B", "base_model") is None
        True
    """
    if not name.startswith(PREFIX):
        return None
    here = Path(str(files("anchorlora.embedded")))
    place = here / name.removeprefix(PREFIX) / part
    known = sorted(p.parent.name for p in here.glob(f"*/{part}"))
    if name.removeprefix(PREFIX) not in known:
        raise UnknownName(f"nothing embedded is called {name!r}; available: {', '.join(PREFIX + k for k in known)}")
    return place
