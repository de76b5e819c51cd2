"""Figures of accuracy: task by task, against forgetting, and on one base model against another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from matplotlib.figure import Figure

from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.figures.style import Looks, named, panels, plain
from anchorlora_lab.report.layout import value_of
from anchorlora_lab.report.paired_tests import mean_interval
from anchorlora_lab.report.records import Run, by_method, deviation, families_of, mean, mean_of
from anchorlora_lab.report.tables.base_models import runs_by_base_model
from anchorlora_lab.report.tables.scores import interval_over_examples


def accuracy_by_stage(runs: Sequence[Run], looks: Looks) -> Figure:
    """Draw the mean accuracy on all tasks so far, after each task: means over runs.

    With a band of one standard deviation for a single order, and with the mean's 95 % intervals for six runs or more.
    """
    stages, one_order = range(1, len(runs[0].order) + 1), len({run.order for run in runs}) == 1
    with panels(runs, title="Accuracy after each task") as (figure, axes):
        for at, mine in zip(axes[0], families_of(runs).values(), strict=True):
            for method, same in by_method(mine).items():
                curves = [[mean(row) for row in run.record.accuracy] for run in same]
                middle, look = [mean(values) for values in zip(*curves, strict=True)], looks[method]
                at.plot(stages, middle, look.line, marker=look.marker, color=look.color, label=_label(method, same))
                if one_order:
                    spread = [deviation(values) or 0.0 for values in zip(*curves, strict=True)]
                    low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
                    at.fill_between(stages, low, high, color=look.color, alpha=0.1, linewidth=0)
                elif all(reach := [_reach(values) for values in zip(*curves, strict=True)]):
                    ends = [[each[side][0] for each in reach if each] for side in (0, 1)]
                    at.errorbar(stages, middle, yerr=ends, color=look.color, alpha=0.45, linewidth=1, fmt="none")
            at.set(xlabel="tasks trained", xticks=list(stages))
        axes[0][0].set_ylabel("mean accuracy on these tasks, %")
    return figure


def accuracy_against_forgetting(runs: Sequence[Run], looks: Looks) -> Figure:
    """Draw AA over FM (upper left is better): a large mark for each method's mean with 95 % intervals, small ones for its runs.

    Intervals are those of the means over runs, of which six are needed. All panels share both axes.
    """
    with panels(runs, title="Accuracy against forgetting (upper left is better)", sharex=True) as (figure, axes):
        for at, mine in zip(axes[0], families_of(runs).values(), strict=True):
            for method, same in by_method(mine).items():
                points = [(run.record.scores.FM, run.record.scores.AA) for run in same if run.record.scores.FM is not None]
                if not points:
                    continue
                look = looks[method]
                fm, aa = ([point[i] for point in points] for i in (0, 1))
                at.scatter(fm, aa, s=12, marker=look.marker, color=look.color, alpha=0.3, linewidths=0)
                if len(fm) == len(same):
                    along, up = _reach(fm), _reach(aa)
                    at.errorbar([mean(fm)], [mean(aa)], xerr=along, yerr=up, color=look.color, alpha=0.6, linewidth=1, fmt="none")
                at.scatter([mean(fm)], [mean(aa)], s=90, marker=look.marker, color=look.color, label=_label(method, same))
            at.set(xlabel="FM, percentage points")
        axes[0][0].set_ylabel("AA, %")
    return figure


def one_base_model_against_another(runs: Sequence[Run], looks: Looks) -> Figure:
    """Draw AA and BWT of every method on one base model over those on another, with 95 % intervals over test examples.

    A row for each two base models. Where both put the methods in one order, the marks rise from the lower left.
    """
    rows = [pair for cells in runs_by_base_model(studies_of(runs)) for pair in combinations(cells.items(), 2)]
    figure = Figure(figsize=(11.2, 4.8 * len(rows)), layout="constrained")
    axes, shown = figure.subplots(len(rows), 2, squeeze=False), {}
    figure.suptitle("The same methods on two base models (upper right is better on both)", fontsize="large")
    for row, ((one, ours), (other, theirs)) in zip(axes, rows, strict=True):
        across, up = by_method(ours), by_method(theirs)
        for at, (name, unit) in zip(row, (("AA", "%"), ("BWT", "percentage points")), strict=True):
            for method in (method for method in across if method in up):
                x, y = (mean_of(value_of(run, name) for run in each[method]) for each in (across, up))
                if x is None or y is None:
                    continue
                look, ends = looks[method], [interval_over_examples(each[method], name=name) for each in (across, up)]
                xerr, yerr = ([[m - e[0]], [e[1] - m]] if e else None for m, e in zip((x, y), ends, strict=True))
                at.errorbar([x], [y], xerr=xerr, yerr=yerr, color=look.color, alpha=0.6, linewidth=1, fmt="none")
                shown[named(method)] = at.scatter([x], [y], s=90, marker=look.marker, color=look.color, label=named(method))
            at.set(xlabel=f"{name} on {plain(one)}, {unit}", ylabel=f"{name} on {plain(other)}, {unit}")
            at.grid(alpha=0.25)
            at.set_axisbelow(True)
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure


def _reach(values: Sequence[float]) -> list[list[float]] | None:
    """How far the mean's interval reaches down and up."""
    interval = mean_interval(values)
    return [[mean(values) - interval[0]], [interval[1] - mean(values)]] if interval else None


def _label(method: str, runs: Sequence[Run]) -> str:
    return named(method) + (f" (n = {len(runs)})" if len(runs) > 1 else "")
