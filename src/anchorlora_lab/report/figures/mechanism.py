"""Figures of how methods act: which path to the past is open, gradients and moves, and forgetting against drift over all runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anchorlora.methods import METHODS
from anchorlora.pages.record import short_layers
from anchorlora_lab.report.figures.style import REFERENCE, SMALLEST, PlotStyles, canvas, curve, drawable, named, panels, plain
from anchorlora_lab.report.records import FAMILIES, Family, Run, TracePoint, by_method, families_of, group_by, mean
from anchorlora_lab.report.tables.mechanism import AGAINST, DriftPoint, ratio, spots_of_boundaries, spots_of_runs
from anchorlora_lab.report.tables.settings import energy, layers_of

LABELS = {
    "rho": "rho on the core",
    "held-out": "relative change of held-out past rows",
    "D_eff": "size of the change, D_eff",
    "predicted KL": "predicted KL of earlier answers, nats",
}
LOGARITHMIC = ("rho", "predicted KL")


def paths_to_the_past(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw rho by which path to the core a method leaves open: tasks and runs as dots, geometric means, chance, tolerance."""
    of_families = {family: with_paths for family in FAMILIES if (with_paths := methods_with_paths(runs, family))}
    columns, title = max(1, len(of_families)), "What reaches the core, by what a method leaves open"
    figure, axes = canvas((6.4 * columns, 3.6), 1, columns, title=title, sharex=True)
    for at, (family, methods) in zip(axes[0], of_families.items(), strict=False):
        for row, (method, same) in enumerate(methods.items()):
            values = [drawable(d.rho) or SMALLEST for run in same for d in run.record.drift]
            middle, look = math.exp(mean([math.log(v) for v in values])), looks[method]
            at.scatter(values, [row] * len(values), s=14, color=look.color, alpha=0.3, linewidths=0)
            at.scatter([middle], [row], s=80, color=look.color, marker=look.marker, zorder=3)
            side, shift = ("left", (10, 8)) if middle < 1e-3 else ("right", (0, 9))
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # no reference line runs through a number
            style: dict[str, Any] = {"textcoords": "offset points", "ha": side, "fontsize": "small", "bbox": behind}
            at.annotate(f"{100 * middle:.2g} %", (middle, row), xytext=shift, **style)
        drifts = [d for same in methods.values() for run in same for d in run.record.drift]
        at.axvline(mean([d.chance for d in drifts if d.chance] or [SMALLEST]), linestyle=":", color=REFERENCE, label="chance")
        at.axvline(mean([d.bound for d in drifts]), linestyle="--", color=REFERENCE, label="numerical tolerance")
        open_in = [f"{method}\n{METHODS[method].entry.leaves_open}" for method in methods]
        at.set_yticks(range(len(methods)), open_in, fontsize="small")
        at.set(xscale="log", xlabel="rho on the core used during the task", ylim=(len(methods) - 0.4, -0.6))
        at.set_title(FAMILIES[family], fontsize="medium")
        at.grid(alpha=0.25, which="major", axis="x")
        at.legend(loc="lower center", fontsize="small", frameon=False)
    return figure


def methods_with_paths(runs: Sequence[Run], family: Family) -> dict[str, list[Run]]:
    """Return the runs of a family's methods that differ in what they leave open; none where fewer than two ran."""
    there = by_method([run for run in runs if run.record.drift])
    of_family = [name for name, method in METHODS.items() if method.entry.leaves_open and method.plan.family == family]
    of_paths = {name: there[name] for name in of_family if name in there}
    return of_paths if len(of_paths) > 1 else {}


def gradients_and_moves(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw gradient norms of task and penalties over the steps, and how far A and B have moved: means over runs."""
    rows: list[tuple[str, Callable[[TracePoint], float | None], bool]] = [
        ("gradient of the task", lambda p: p.grad_norms.task if p.grad_norms else None, True),
        ("penalties / task", lambda p: ratio(p) or None if p.grad_norms and p.grad_norms.task else None, True),
        ("move of A", lambda p: p.moves.A if p.moves else None, False),
        ("move of B", lambda p: p.moves.B if p.moves else None, False),
    ]
    if not any(point.moves for run in runs for point in run.trace):
        del rows[2:]
    title = "Gradients, and what the optimizer made of them"
    with panels(runs, title=title, rows=len(rows), height=2.7, below=0.3, sharex=True) as (figure, axes):
        for column, of_family in enumerate(families_of(runs).values()):
            for index, (method, same) in enumerate(by_method(of_family).items()):
                for row, (_, value, _) in enumerate(rows):
                    _means(axes[row][column], method, same, value, index, looks)
            axes[-1][column].set_xlabel("optimizer step of the second task")
        for row, (name, _, logarithmic) in enumerate(rows):
            axes[row][0].set_ylabel(name)
            for at in axes[row]:
                if logarithmic:
                    at.set_yscale("log")
                if name == "penalties / task":
                    if not at.lines:
                        at.text(0.5, 0.7, "no penalty", transform=at.transAxes, ha="center", color=REFERENCE)
                    at.axhline(1, linestyle=":", color=REFERENCE)
    return figure


def _means(
    at: Axes, method: str, runs: Sequence[Run], value: Callable[[TracePoint], float | None], index: int, looks: PlotStyles
) -> None:
    known = [(point.step, norm) for run in runs for point in run.trace if (norm := value(point)) is not None]
    whole = {step: pairs for step, pairs in group_by(known, lambda pair: pair[0]).items() if len(pairs) == len(runs)}
    if whole:
        means = [mean([norm for _, norm in pairs]) for pairs in whole.values()]
        curve(at, method, looks, index, list(whole), means, marks=8, linewidth=1.2)


def forgetting_of_runs(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw FM over rho, the change of held-out rows, the size of the change, and the predicted KL where most runs have it. One dot
    is a run, one large mark a method's mean.
    """
    return _clouds(spots_of_runs(runs), looks, title="Forgetting against drift, one dot a run", label="FM, percentage points")


def forgetting_of_boundaries(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw what earlier tasks lost during a task over that task's drift: one dot a boundary, one large mark a method's mean."""
    label = "lost by earlier tasks, points"
    return _clouds(spots_of_boundaries(runs), looks, title="Forgetting against drift, one dot a boundary", label=label)


def _clouds(spots: Sequence[DriftPoint], looks: PlotStyles, *, title: str, label: str) -> Figure:
    families = families_of([spot.run for spot in spots])
    known = {name: sum(spot.drift[name] is not None for spot in spots) for name in AGAINST}
    against = [name for name in AGAINST if 2 * known[name] > len(spots)]  # what few have is in the table
    size = (4.1 * len(against) + 0.1, 3.7 * len(families) + 1.2)
    figure, axes = canvas(size, len(families), len(against), title=title, grid=True, sharex="col", sharey=True)
    for row, family in zip(axes, families, strict=True):
        of_family = [spot for spot in spots if spot.run.family == family]
        for at, name in zip(row, against, strict=True):
            for method in by_method([spot.run for spot in of_family]):
                points = [(x, spot.lost) for spot in of_family if spot.run.method == method and (x := spot.drift[name]) is not None]
                if points:
                    xs, ys = ([point[i] for point in points] for i in (0, 1))
                    xs, look = [drawable(x) or SMALLEST for x in xs], looks[method]
                    middle = math.exp(mean([math.log(x) for x in xs])) if name in LOGARITHMIC else mean(xs)
                    at.scatter(xs, ys, s=12, marker=look.marker, color=look.color, alpha=0.3, linewidths=0)
                    at.scatter([middle], [mean(ys)], s=70, marker=look.marker, color=look.color, label=named(method))
            at.set_xscale("log" if name in LOGARITHMIC else "linear")
            at.set_xlabel(LABELS[name])
        row[0].set_ylabel(f"{FAMILIES[family]}\n{label}")
        handles, labels = row[0].get_legend_handles_labels()
        row[-1].legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    return figure


NAMED = 24  # layers that have room for their names


def energy_by_layer(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw the energy retained after the last task, means over each method's runs; dashed: the share that the protocol asks for."""
    layers = layers_of(runs)
    places = list(range(len(layers)))
    with panels(runs, title="Energy retained by the cores after the last task", below=0.22) as (figure, axes):
        for at, of_family in zip(axes[0], families_of(runs).values(), strict=True):
            for method, same in by_method(of_family).items():
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
