"""Data that comes with the package: the `mini` base model and benchmark, made by the programs in tools/mini."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from anchorlora.errors import UnknownName

PREFIX = "embedded:"


def folder(name: str, part: str) -> Path | None:
    """Return the folder of an embedded base model or benchmark."""
    if not name.startswith(PREFIX):
        return None
    here = Path(str(files("anchorlora.embedded")))
    path = here / name.removeprefix(PREFIX) / part
    known = sorted(p.parent.name for p in here.glob(f"*/{part}"))
    if name.removeprefix(PREFIX) not in known:
        raise UnknownName(f"nothing embedded is called {name!r}; available: {', '.join(PREFIX + k for k in known)}")
    return path
