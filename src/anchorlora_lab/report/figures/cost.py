"""Figures of what each method costs, and of the energy that cores retain layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from anchorlora.pages.labels import short_layers
from anchorlora_lab.report.figures.style import REFERENCE, Looks, named, panels, plain
from anchorlora_lab.report.records import Run, by_method, families_of, mean
from anchorlora_lab.report.tables.energy import energy, layers_of, step_seconds

MEASURES = ("training, ms/step", "evaluation, s", "peak memory, MB", "stored parameters, thousands", "history, kB")


def cost_of_methods(runs: Sequence[Run], looks: Looks) -> Figure:
    """Draw the means over each method's runs, one panel per quantity."""
    methods = by_method(runs)
    measured = {method: _measures(mine) for method, mine in methods.items()}
    size = (13, 1.6 + 0.27 * len(methods))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(MEASURES), sharey=True, squeeze=False)
    for i, (at, name) in enumerate(zip(axes[0], MEASURES, strict=True)):
        for place, method in enumerate(methods):
            look = looks[method]
            at.plot([0, measured[method][i]], [place, place], color=look.color, alpha=0.45, linewidth=2)
            at.plot([measured[method][i]], [place], look.marker, color=look.color)
        at.set_xlabel(name, fontsize="small")
        at.set_xlim(left=0)
        at.tick_params(axis="x", labelsize="small")
        at.grid(alpha=0.25, axis="x")
    axes[0][0].set(yticks=range(len(methods)), yticklabels=[named(method) for method in methods], ylim=(len(methods) - 0.5, -0.5))
    figure.suptitle("Cost of a run", fontsize="large")
    return figure


def _measures(runs: Sequence[Run]) -> tuple[float, ...]:
    costs = [run.record.cost for run in runs]
    steps = [seconds for run in runs if (seconds := step_seconds(run)) is not None]
    return (
        1000 * mean(steps) if steps else float("nan"),
        mean([c.evaluate_seconds for c in costs]),
        mean([c.peak_memory_bytes / 1e6 for c in costs]),
        mean([c.stored_parameters / 1e3 for c in costs]),
        mean([c.history_bytes / 1e3 for c in costs]),
    )


NAMED = 24  # layers that have room for their names


def energy_by_layer(runs: Sequence[Run], looks: Looks) -> Figure:
    """Draw the energy retained after the last task, means over each method's runs; dashed: the share that the protocol asks for."""
    layers = layers_of(runs)
    places = list(range(len(layers)))
    with panels(runs, title="Energy retained by the cores after the last task", below=0.22) as (figure, axes):
        for at, mine in zip(axes[0], families_of(runs).values(), strict=True):
            for method, same in by_method(mine).items():
                values, look = [mean([energy(run, layer) for run in same]) for layer in layers], looks[method]
                at.plot(
                    places,
                    values,
                    marker=look.marker,
                    markersize=5,
                    linestyle="none",
                    color=look.color,
                    label=named(method),
                )
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
