"""rho on logarithmic axes: task by task, and on current, first and all past cores."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anchorlora.record import DriftFacts
from anchorlora.reports.figures.style import REFERENCE, Looks, beside_each_other, drawable, panels, plain
from anchorlora.reports.records import Run, by_method, families_of, mean

CORES = {"current core": "rho", "first core": "rho_first", "all past cores": "rho_union"}


def drift_by_task(runs: Sequence[Run], looks: Looks) -> Figure:
    """rho of every task on the core used during it: geometric mean over runs, a dot a run, chance, and what counts as zero."""
    stages = list(range(2, max(len(run.order) for run in runs) + 1))
    with panels(runs, title="Drift on protected directions, by task", height=5.6) as (figure, axes):
        for at, mine in zip(axes[0], families_of(runs).values(), strict=True):
            methods = by_method(mine)
            for shift, (method, same) in zip(beside_each_other(len(methods)), methods.items(), strict=True):
                each = {t + shift: _ratios([d for run in same for d in run.record.drift if d.task == t], "rho") for t in stages}
                _draw(at, method, each, looks)
            _references(at, [d for run in mine for d in run.record.drift], stages)
            at.set(yscale="log", xlabel="task", xticks=stages)
        axes[0][0].set_ylabel("rho on the protected core")
    return figure


def rho_on_cores(runs: Sequence[Run], looks: Looks) -> Figure:
    """rho of the last task on its own core, on the first task's and on the union of all past ones."""
    places = list(range(len(CORES)))
    with panels(runs, title="The last task on current, first and all past cores", height=5.6) as (figure, axes):
        for at, mine in zip(axes[0], families_of(runs).values(), strict=True):
            last = {method: [r.record.drift[-1] for r in same if r.record.drift] for method, same in by_method(mine).items()}
            for shift, (method, drifts) in zip(beside_each_other(len(last)), last.items(), strict=True):
                each = {place + shift: _ratios(drifts, field) for place, field in zip(places, CORES.values(), strict=True)}
                _draw(at, method, each, looks)
            bounds = [d.bound for drifts in last.values() for d in drifts]
            at.axhline(mean(bounds), linestyle="--", color=REFERENCE, label="largest that counts as zero")
            at.set(yscale="log", xticks=places, xticklabels=list(CORES))
            at.margins(x=0.12)
        axes[0][0].set_ylabel("rho")
    return figure


def _ratios(drifts: Sequence[DriftFacts], field: str) -> list[float]:
    values = [drawable(getattr(d, field)) for d in drifts]
    return [value for value in values if value is not None]


def _draw(at: Axes, method: str, found: dict[float, list[float]], looks: Looks) -> None:
    """A line through geometric means, and a dot for each value."""
    values, look = {x: each for x, each in found.items() if each}, looks[method]
    if not values:
        return
    middle = [math.exp(mean([math.log(v) for v in each])) for each in values.values()]
    at.plot(list(values), middle, marker=look.marker, linewidth=1, color=look.color, label=plain(method))
    places, dots = zip(*((x, value) for x, each in values.items() for value in each), strict=True)
    at.scatter(places, dots, s=8, color=look.color, alpha=0.3, linewidths=0)


def _references(at: Axes, drifts: Sequence[DriftFacts], stages: Sequence[int]) -> None:
    chance = {t: [d.chance for d in drifts if d.task == t and d.chance] for t in stages}
    bound = {t: [d.bound for d in drifts if d.task == t] for t in stages}
    for name, style, values in (("chance", ":", chance), ("largest that counts as zero", "--", bound)):
        known = {t: mean(v) for t, v in values.items() if v}
        at.plot(list(known), list(known.values()), style, color=REFERENCE, label=name)
