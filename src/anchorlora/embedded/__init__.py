"""What travels with the package: the `mini` base model and benchmark, made by the programs in tools/mini."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from anchorlora.errors import UnknownName

PREFIX = "embedded:"


def folder(name: str, part: str) -> Path | None:
    """The folder "data" or "base_model" of an embedded set such as "embedded:mini"; None for any other name."""
    if not name.startswith(PREFIX):
        return None
    here = Path(str(files("anchorlora.embedded")))
    place = here / name.removeprefix(PREFIX) / part
    known = sorted(p.parent.name for p in here.glob(f"*/{part}"))
    if name.removeprefix(PREFIX) not in known:
        raise UnknownName(f"nothing embedded is called {name!r}; there is: {', '.join(PREFIX + k for k in known)}")
    return place
