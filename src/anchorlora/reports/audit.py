"""An audit as one HTML page, from its JSON alone: for a reader who ran nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anchorlora.reports.html import escaping

MEANINGS = {
    "displacement": ("|ΔA V| / |ΔA|", "Did the factor A move inside the protected directions?"),
    "state": ("|A V| / |A|", "Does A read the protected directions at all?"),
    "companion": ("|ΔB| / |B|", "Did the factor B move, which carries along what A read at the start?"),
    "response": ("|ΔW V| / |ΔW|, called ρ", "What the layer itself does to the protected directions in the end."),
}
KEPT = {True: "kept", False: "not kept", None: "cannot be told"}
KINDS = {
    "learned anchor": "a block that had been trained before (B was not zero)",
    "zero-output block": "a new block that had no effect at first (B was zero)",
    "other rank": "a block of another rank or scale than before",
    "full weight": "the weight itself",
    "mixed": "several kinds of blocks",
    "unmoved": "nothing that moved",
}


def write_audit(found: Mapping[str, Any], path: Path) -> None:
    """Write the page.  The folder must exist."""
    path.write_text(render(found), encoding="utf-8")


def render(found: Mapping[str, Any]) -> str:
    """The page.  Everything that comes from files is escaped; nothing is loaded from elsewhere."""
    environment = escaping()
    environment.filters |= {"number": number, "percent": percent}
    page = environment.get_template("audit.html.j2")
    return page.render(found=found, meanings=MEANINGS, kept=KEPT, kinds=KINDS, widest=_widest(found))


def number(value: float | None) -> str:
    """A norm or a tiny ratio; a dash where it is undefined."""
    return "–" if value is None else "0" if value == 0 else f"{value:.2e}"


def percent(value: float | None) -> str:
    """A share in percent; below a hundredth of a percent as a power of ten."""
    return number(value) if value is None or value < 1e-4 else f"{100 * value:.2f} %"


def _widest(found: Mapping[str, Any]) -> float:
    """The largest share that a bar shows."""
    shares = [row[name] for row in found["layers"].values() for name in ("rho", "chance") if row[name] is not None]
    return max(shares, default=1.0) or 1.0
