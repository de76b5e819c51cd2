"""Render an audit as one HTML page, from its JSON alone, for a reader who ran nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anchorlora.pages.html import templates


def verdict_on(condition: Mapping[str, Any], overall: Mapping[str, Any]) -> str:
    """Return the verdict on a condition in words: one that does not hold where the change is preserved is not claimed."""
    if condition["preserved"] is False:
        return "not claimed" if overall["status"] == "preserved" else "violated"
    return "preserved" if condition["preserved"] else "unknown"


def render(audit: Mapping[str, Any]) -> str:
    """Return the page as HTML. Text from files is escaped, and the page loads nothing."""
    environment = templates()
    environment.filters |= {"number": number, "percent": percent}
    shares = [row[name] for row in audit["layers"].values() for name in ("rho", "chance") if row[name] is not None]
    widest = max(shares, default=1.0) or 1.0  # share that a bar shows
    return environment.get_template("audit.html.j2").render(audit=audit, verdict_on=verdict_on, widest=widest)


def number(value: float | None) -> str:
    """Return a norm or a tiny ratio as text."""
    return "–" if value is None else "0" if value == 0 else f"{value:.2e}"


def percent(value: float | None) -> str:
    """Return a fraction in percent, or as a power of ten below 0.01 %."""
    return number(value) if value is None or value < 1e-4 else f"{100 * value:.2f} %"
