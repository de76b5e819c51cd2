"""Retained energy of the last task's cores, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from anchorlora.reports.figures.style import REFERENCE, Looks, panels, plain
from anchorlora.reports.names import short_layers
from anchorlora.reports.records import Run, by_method, families_of, mean
from anchorlora.reports.tables.energy import energy, layers_of

NAMED = 24  # layers that have room for their names


def energy_by_layer(runs: Sequence[Run], looks: Looks) -> Figure:
    """Mean over a method's runs; a broken line at the share that the protocol asks for."""
    layers = layers_of(runs)
    places = list(range(len(layers)))
    with panels(runs, title="Energy that the cores retain after the last task", below=0.22) as (figure, axes):
        for at, mine in zip(axes[0], families_of(runs).values(), strict=True):
            for method, same in by_method(mine).items():
                values, look = [mean([energy(run, layer) for run in same]) for layer in layers], looks[method]
                at.plot(places, values, marker=look.marker, markersize=5, linewidth=1, color=look.color, label=plain(method))
            asked = runs[0].energy_asked
            if asked is not None:
                at.axhline(asked, linestyle="--", color=REFERENCE, label="asked for")
            if len(layers) <= NAMED:
                at.set_xticks(places, [plain(layer) for layer in short_layers(layers)], rotation=90, fontsize="x-small")
            else:
                at.set_xlabel("adapted layer")
        axes[0][0].set_ylabel("retained energy, fraction")
    return figure
