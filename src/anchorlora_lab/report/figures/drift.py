"""Figures of rho on logarithmic axes: task by task, on several cores, and over the steps of the two-task mechanism trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anchorlora.store.record import ChangeFacts, DriftFacts
from anchorlora_lab.report.figures.style import (
    REFERENCE,
    SMALLEST,
    PlotStyles,
    beside_each_other,
    curve,
    drawable,
    logarithmic,
    named,
    panels,
    plain,
)
from anchorlora_lab.report.records import Run, TracePoint, by_method, deviation, families_of, mean, mean_of

CORES = {"current core": "rho", "first core": "rho_first", "all past cores": "rho_union"}


def drift_by_task(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw rho of every task on the core used during it: geometric means, one dot per run, chance, and the numerical tolerance."""
    stages = list(range(2, max(len(run.order) for run in runs) + 1))
    with panels(runs, title="Drift on protected directions, by task", height=5.6) as (figure, axes):
        for at, of_family in zip(axes[0], families_of(runs).values(), strict=True):
            methods = by_method(of_family)
            for shift, (method, same) in zip(beside_each_other(len(methods)), methods.items(), strict=True):
                ratios = {t + shift: _ratios([d for run in same for d in run.record.drift if d.task == t], "rho") for t in stages}
                _draw(at, method, ratios, looks)
            _references(at, {t: [d for run in of_family for d in run.record.drift if d.task == t] for t in stages})
            at.set(xlabel="task", xticks=stages)
            logarithmic(at)
        axes[0][0].set_ylabel("rho on the protected core")
    return figure


def rho_on_cores(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw rho of the last task on its own core, the first task's, and the union of all past ones."""
    places = list(range(len(CORES)))
    with panels(runs, title="The last task on the current core, the first core, and all past cores", height=5.6) as (figure, axes):
        for at, of_family in zip(axes[0], families_of(runs).values(), strict=True):
            last = {method: [r.record.drift[-1] for r in same if r.record.drift] for method, same in by_method(of_family).items()}
            for shift, (method, drifts) in zip(beside_each_other(len(last)), last.items(), strict=True):
                ratios = {position + shift: _ratios(drifts, field) for position, field in zip(places, CORES.values(), strict=True)}
                _draw(at, method, ratios, looks, line="none")
            bounds = [d.bound for drifts in last.values() for d in drifts]
            at.axhline(mean(bounds), linestyle="--", color=REFERENCE, label="numerical tolerance")
            at.set(xticks=places, xticklabels=list(CORES))
            logarithmic(at)
            at.margins(x=0.12)
        axes[0][0].set_ylabel("rho")
    return figure


def _ratios(drifts: Sequence[DriftFacts], field: str) -> list[float]:
    return [value for d in drifts if (value := drawable(getattr(d, field))) is not None]


def _draw(at: Axes, method: str, ratios: dict[float, list[float]], looks: PlotStyles, *, line: str = "") -> None:
    """Geometric means, joined by a line where they follow each other, and a dot for each value."""
    values, look = {x: some for x, some in ratios.items() if some}, looks[method]
    if not values:
        return
    middle = [math.exp(mean([math.log(v) for v in some])) for some in values.values()]
    style: dict[str, Any] = {"marker": look.marker, "linestyle": line or look.line, "linewidth": 1, "color": look.color}
    at.plot(list(values), middle, label=named(method), **style)
    places, dots = zip(*((x, value) for x, some in values.items() for value in some), strict=True)
    at.scatter(places, dots, s=8, color=look.color, alpha=0.3, linewidths=0)


def _references(at: Axes, points: Mapping[int, Sequence[ChangeFacts]]) -> None:
    """The chance level and the numerical tolerance at each place: means over what was measured there."""
    lines: dict[str, tuple[str, Callable[[ChangeFacts], float | None]]] = {
        "chance": (":", lambda point: point.chance or None),
        "numerical tolerance": ("--", lambda point: point.bound),
    }
    for name, (style, of) in lines.items():
        known = {position: value for position, some in points.items() if (value := mean_of(map(of, some))) is not None}
        at.plot(list(known), list(known.values()), style, color=REFERENCE, label=name)


def trajectories(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw rho over optimizer steps (top, without step 0) and its last value with the percentage (bottom), on one scale."""
    tasks = plain(" -> ".join(runs[0].order))
    with panels(runs, title=f"rho while training on the second task: {tasks}", rows=2, height=4.2) as (figure, axes):
        for curves, ends, of_family in zip(*axes, families_of(runs).values(), strict=True):
            methods = by_method(of_family)
            for position, (method, same) in enumerate(methods.items()):
                _curve(curves, method, same, position, looks)
                _end(ends, method, same, position, looks)
            _references(curves, _by_step(of_family))
            curves.set(xlabel="optimizer step")
            names = [fill(named(method), 12, break_long_words=False) for method in methods]
            ends.set_xticks(range(len(methods)), names, fontsize="small")
            ends.set_xlim(-0.6, len(methods) - 0.4)
        _one_scale(axes)
    return figure


def _by_step(runs: Sequence[Run]) -> dict[int, Sequence[TracePoint]]:
    """Step -> its points in all runs, where rho is known."""
    known = ([point for point in run.trace if point.rho is not None] for run in runs)
    return {points[0].step: points for points in zip(*known, strict=False)}


def _curve(at: Axes, method: str, runs: Sequence[Run], position: int, looks: PlotStyles) -> None:
    values = {step: [drawable(point.rho) or SMALLEST for point in points] for step, points in _by_step(runs).items()}
    low, high = _band(list(values.values()))
    curve(at, method, looks, position, list(values), list(map(mean, values.values())), marks=10, linestyle=looks[method].line)
    at.fill_between(list(values), low, high, color=looks[method].color, alpha=0.18, linewidth=0)


def _end(at: Axes, method: str, runs: Sequence[Run], position: int, looks: PlotStyles) -> None:
    values, look = [drawable(run.trace[-1].rho) or SMALLEST for run in runs], looks[method]
    (low,), (high,) = _band([values])
    middle = mean(values)
    reach = [[middle - low], [high - middle]]
    at.errorbar([position], [middle], yerr=reach, color=look.color, marker=look.marker, markersize=8, capsize=4)
    at.annotate(f"{100 * middle:.3g} %", (position, high), xytext=(0, 6), textcoords="offset points", ha="center", fontsize="small")


def _band(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """One standard deviation to both sides; the lower edge stays drawable."""
    pairs = [(mean(v), deviation(v) or 0.0) for v in values]
    return [max(m - s, m / 10, SMALLEST) for m, s in pairs], [m + s for m, s in pairs]


def _one_scale(axes: Sequence[Sequence[Axes]]) -> None:
    every = [at for row in axes for at in row]
    for at in every:
        logarithmic(at)
    low, high = min(at.get_ylim()[0] for at in every), max(at.get_ylim()[1] for at in every)
    for at in every:
        at.set_ylim(low, high * 3)
    for row, name in zip(axes, ("rho", "rho at the last step"), strict=True):
        row[0].set_ylabel(name)
