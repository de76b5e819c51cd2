"""Figures of what each method costs, and of the energy that cores retain layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from anchorlora.pages.labels import short_layers
from anchorlora_lab.report.figures.style import REFERENCE, Looks, named, panels, plain
from anchorlora_lab.report.records import Run, by_method, families_of, mean
from anchorlora_lab.report.tables.energy import cost_table, energy, layers_of

MEASURES = {  # label of an axis -> heading of the table of costs, and what is one on the axis
    "training, ms/step": ("ms/step", 1.0),
    "evaluation, s": ("evaluation s", 1.0),
    "peak memory, MB": ("peak MB", 1.0),
    "stored parameters, thousands": ("stored", 1e3),
    "history, kB": ("history kB", 1.0),
}


def cost_of_methods(runs: Sequence[Run], looks: Looks) -> Figure:
    """Draw the means over each method's runs, one panel per quantity."""
    table = cost_table(runs)
    rows: list[dict[str, Any]] = [dict(zip((column.heading for column in table.columns), row, strict=True)) for row in table.rows]
    figure = Figure(figsize=(13, 1.6 + 0.27 * len(rows)), layout="constrained")
    axes = figure.subplots(1, len(MEASURES), sharey=True, squeeze=False)[0]
    for at, (name, (heading, unit)) in zip(axes, MEASURES.items(), strict=True):
        for place, row in enumerate(rows):
            look, value = looks[row["method"]], row.get(heading)
            value = float("nan") if value is None else value / unit
            at.plot([0, value], [place, place], color=look.color, alpha=0.45, linewidth=2)
            at.plot([value], [place], look.marker, color=look.color)
        at.set_xlabel(name, fontsize="small")
        at.set_xlim(left=0)
        at.tick_params(axis="x", labelsize="small")
        at.grid(alpha=0.25, axis="x")
    axes[0].set(yticks=range(len(rows)), yticklabels=[named(row["method"]) for row in rows], ylim=(len(rows) - 0.5, -0.5))
    figure.suptitle("Cost of a run", fontsize="large")
    return figure


NAMED = 24  # layers that have room for their names


def energy_by_layer(runs: Sequence[Run], looks: Looks) -> Figure:
    """Draw the energy retained after the last task, means over each method's runs; dashed: the share that the protocol asks for."""
    layers = layers_of(runs)
    places = list(range(len(layers)))
    with panels(runs, title="Energy retained by the cores after the last task", below=0.22) as (figure, axes):
        for at, mine in zip(axes[0], families_of(runs).values(), strict=True):
            for method, same in by_method(mine).items():
                values, look = [mean([energy(run, layer) for run in same]) for layer in layers], looks[method]
                at.plot(places, values, marker=look.marker, markersize=5, linestyle="none", color=look.color, label=named(method))
            asked = runs[0].energy_asked
            if asked is not None:
                at.axhline(asked, linestyle="--", color=REFERENCE, label="requested")
            if len(layers) <= NAMED:
                at.set_xticks(places, [plain(layer) for layer in short_layers(layers)], rotation=90, fontsize="x-small")
            else:
                at.set_xlabel("adapted layer")
        axes[0][0].set_ylabel("retained energy, fraction")
    figure.draw_without_rendering()  # its tick labels get longer when it is first laid out, and would push the label off the page
    return figure
