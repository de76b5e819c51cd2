"""Templates of pages and cards: in HTML every value from a file is escaped, and an undefined name is an error."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from anchorlora.text import visible

OPTION = re.compile(r"(?<![^\s(])(--[a-z][a-z-]+)")


def templates(*packages: str, html: bool = True) -> Environment:
    """Return the environment of our templates, and of other packages'; HTML escapes everything that comes from files."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in ("anchorlora.pages", *packages)]),
        autoescape=html,
        undefined=StrictUndefined,
        finalize=_as_text if html else None,
        keep_trailing_newline=not html,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["options"] = _options
    return environment


def _options(text: str) -> Markup:
    """A sentence in which no line ends within an option's name."""
    return Markup(OPTION.sub(r"<code>\1</code>", str(escape(visible(text)))))


def script_of(environment: Environment, name: str) -> tuple[Markup, str]:
    """Return a script of ours, and the source that a Content-Security-Policy names it by: no other script runs in the page."""
    script = environment.get_template(name).render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Markup(script), f"sha256-{digest}"


def _as_text(value: Any) -> Any:
    """Return a value as a page's template writes it: text without characters that reverse lines; our own markup unchanged."""
    return visible(value) if type(value) is str else value
