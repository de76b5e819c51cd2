"""Templates of HTML pages: every value from a file is escaped, and an undefined name is an error."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from anchorlora.schemas.text import visible


def escaping() -> Environment:
    """Return the environment of our templates, which escapes everything that comes from files."""
    return Environment(
        loader=PackageLoader("anchorlora.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _as_text(value: Any) -> Any:
    """What a page's template puts out: text without what turns lines round; markup that was made here as it is."""
    return visible(value) if type(value) is str else value
