"""What moved between two saved adapters, and what of it was protected: no model, no training, files only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from anchorlora.adapters import Scope, Site, read_adapter
from anchorlora.diagnostics import Drift, measure
from anchorlora.features.files import read_cores
from anchorlora.geometry import Factors, Subspace
from anchorlora.schemas.run_folder import refuse_altered


def compare(before: Path, after: Path, *, cores: Path) -> Drift:
    """The drift from one saved PEFT adapter to another of the same base, on the cores of a file, with every layer.

    Where the later adapter is the earlier one with blocks stacked behind it, the change is the newer rows alone, exact to the
    last digit. Raises ValueError when adapters or cores do not fit each other, and for a run's file that is not what it wrote.
    """
    for place in (before, after, cores):
        refuse_altered(place)
    return measure(Scope(sites(read_adapter(before), read_adapter(after), read_cores(cores))))


def sites(before: Mapping[str, Factors], after: Mapping[str, Factors], cores: Mapping[str, Subspace]) -> tuple[Site, ...]:
    """One site a layer, the earlier factors as its anchor."""
    for what, other in (("the two adapters", set(before)), ("adapter and cores", set(cores))):
        if other != set(after):
            odd = sorted(other ^ set(after))
            raise ValueError(f"{what} do not fit: {odd[0]} and {len(odd) - 1} others are in one of them only")
    out = []
    for layer, now in after.items():
        if cores[layer].d != now.A.shape[1]:
            raise ValueError(f"the core of {layer} has width {cores[layer].d}, but its A reads {now.A.shape[1]} inputs")
        newer = now.grown_from(before[layer])
        current, anchor = (newer, newer.unborn()) if newer else (now, before[layer])
        out.append(Site(layer, current, anchor, core=cores[layer]))
    return tuple(out)
