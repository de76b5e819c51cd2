"""Pages: every value from a file is text in them, and a name that a template lacks is an error."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from anchorlora.reports.captions import plain


def escaping() -> Environment:
    """Templates in which everything that comes from files is escaped."""
    return Environment(
        loader=PackageLoader("anchorlora.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=plain,
        trim_blocks=True,
        lstrip_blocks=True,
    )
