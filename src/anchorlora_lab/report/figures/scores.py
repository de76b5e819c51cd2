"""Figures of accuracy: task by task, against forgetting, and on one base model against another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from matplotlib.figure import Figure

from anchorlora.methods import METHODS
from anchorlora.pages.record import order_label
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.figures.style import REFERENCE, PlotStyles, beside_each_other, canvas, named, panels, plain
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import value_of
from anchorlora_lab.report.paired_tests import mean_interval
from anchorlora_lab.report.records import Run, by_method, deviation, families_of, mean, mean_of
from anchorlora_lab.report.tables.base_models import runs_by_base_model
from anchorlora_lab.report.tables.references import References, exact_methods, unprotected_method
from anchorlora_lab.report.tables.scores import interval_over_examples


def accuracy_by_stage(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw the mean accuracy on all tasks so far, after each task: means over runs. With a band of one standard deviation for a
    single order, and with the mean's 95 % intervals for six runs or more.
    """
    stages, one_order = range(1, len(runs[0].order) + 1), len({run.order for run in runs}) == 1
    with panels(runs, title="Accuracy after each task") as (figure, axes):
        for at, of_family in zip(axes[0], families_of(runs).values(), strict=True):
            for method, same in by_method(of_family).items():
                curves = [[mean(row) for row in run.record.accuracy] for run in same]
                middle, look = [mean(values) for values in zip(*curves, strict=True)], looks[method]
                at.plot(stages, middle, look.line, marker=look.marker, color=look.color, label=_label(method, same))
                if one_order:
                    spread = [deviation(values) or 0.0 for values in zip(*curves, strict=True)]
                    low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
                    at.fill_between(stages, low, high, color=look.color, alpha=0.1, linewidth=0)
                elif all(arms := [_arms(mean(values), mean_interval(values)) for values in zip(*curves, strict=True)]):
                    ends = [[arm[side][0] for arm in arms if arm] for side in (0, 1)]
                    at.errorbar(stages, middle, yerr=ends, color=look.color, alpha=0.45, linewidth=1, fmt="none")
            at.set(xlabel="tasks trained", xticks=list(stages))
        axes[0][0].set_ylabel("mean accuracy on these tasks, %")
    return figure


def accuracy_against_forgetting(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw AA over FM (upper left is better): a large mark for each method's mean with 95 % intervals, small ones for its runs.
    Intervals are those of the means over runs, of which six are needed. All panels share both axes.
    """
    with panels(runs, title="Accuracy against forgetting (upper left is better)", sharex=True) as (figure, axes):
        for at, of_family in zip(axes[0], families_of(runs).values(), strict=True):
            for method, same in by_method(of_family).items():
                points = [(run.record.scores.FM, run.record.scores.AA) for run in same if run.record.scores.FM is not None]
                if not points:
                    continue
                look = looks[method]
                fm, aa = ([point[i] for point in points] for i in (0, 1))
                at.scatter(fm, aa, s=12, marker=look.marker, color=look.color, alpha=0.3, linewidths=0)
                if len(fm) == len(same):
                    along, up = (_arms(mean(values), mean_interval(values)) for values in (fm, aa))
                    at.errorbar([mean(fm)], [mean(aa)], xerr=along, yerr=up, color=look.color, alpha=0.6, linewidth=1, fmt="none")
                at.scatter([mean(fm)], [mean(aa)], s=90, marker=look.marker, color=look.color, label=_label(method, same))
            at.set(xlabel="FM, percentage points")
        axes[0][0].set_ylabel("AA, %")
    return figure


def one_base_model_against_another(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw AA and BWT of every method on one base model over those on another, with 95 % intervals over test examples. A row for
    each two base models. Where both put the methods in one order, the marks rise from the lower left.
    """
    rows = [pair for cells in runs_by_base_model(studies_of(runs)) for pair in combinations(cells.items(), 2)]
    title, shown = "The same methods on two base models (upper right is better on both)", {}
    figure, axes = canvas((11.2, 4.8 * len(rows)), len(rows), 2, title=title, grid=True)
    for row, ((one, ours), (other, others)) in zip(axes, rows, strict=True):
        across, up = by_method(ours), by_method(others)
        for at, (name, unit) in zip(row, (("AA", "%"), ("BWT", "percentage points")), strict=True):
            for method in (method for method in across if method in up):
                x, y = (mean_of(value_of(run, name) for run in side[method]) for side in (across, up))
                if x is None or y is None:
                    continue
                look, ends = looks[method], [interval_over_examples(side[method], name=name) for side in (across, up)]
                xerr, yerr = map(_arms, (x, y), ends)
                at.errorbar([x], [y], xerr=xerr, yerr=yerr, color=look.color, alpha=0.6, linewidth=1, fmt="none")
                shown[named(method)] = at.scatter([x], [y], s=90, marker=look.marker, color=look.color, label=named(method))
            at.set(xlabel=f"{name} on {plain(one)}, {unit}", ylabel=f"{name} on {plain(other)}, {unit}")
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure


def _arms(middle: float, interval: tuple[float, float] | None) -> list[list[float]] | None:
    """How far an interval reaches down and up, as matplotlib draws it."""
    return [[max(middle - interval[0], 0.0)], [max(interval[1] - middle, 0.0)]] if interval else None


def _label(method: str, runs: Sequence[Run]) -> str:
    return named(method) + (f" (n = {len(runs)})" if len(runs) > 1 else "")


BARS: dict[str, Any] = {"markersize": 6, "linewidth": 2, "capsize": 3, "elinewidth": 1}  # of the first figure
WIDTH = 8.2  # inches; 800 pixels at the size of a page's column
FITTING = 96  # letters of a legend that fit one line
OWN = 3  # methods of the user's own in the first figure
NUMBERED = 8  # tasks that leave room for a number in each cell


def task_by_task(runs: Sequence[Run], looks: PlotStyles, reference: str | None = None) -> Figure:
    """Draw the accuracy of every task, from when it was learned to the end, without and with protection, in one panel per task.

    Protected is the method with the highest AA of those whose rho counts as zero after every task. The user's own methods are drawn
    too, and a reference in place of the unprotected method. Means over the seeds of the first order have 95 % intervals, over runs
    if there are six, over test examples for one run with predictions. The dotted line is the majority label.
    """
    order, grid = Grid(runs).orders[0], Grid(runs)
    roles = roles_of(runs, reference)
    runs_of = {method: [run for run in grid.of_method(method) if run.order == order] for method in roles}
    level = References.of(runs).majority
    down = -(-len(order) // 5)
    figure, _ = canvas((WIDTH, 3.6 * down), down, min(len(order), 5), sharex=True, sharey=True)
    axes = figure.axes
    for i, (at, task) in enumerate(zip(axes, order, strict=False)):
        last = {method: mean([run.record.accuracy[-1][i] for run in same]) for method, same in runs_of.items() if same}
        for shift, (method, end) in zip(beside_each_other(len(last), width=0.3), last.items(), strict=True):
            look, same, stages = looks[method], runs_of[method], range(i + 1, len(order) + 1)
            values = [[run.record.accuracy[stage - 1][i] for run in same] for stage in stages]
            answered = {len(values): "LA", 1: "AA"}  # by how many stages are left: those whose answers are kept
            ends = [_interval(same, task, column, answered.get(len(values) - k, "")) for k, column in enumerate(values)]
            arms = [_arms(mean(column), end) or [[0.0], [0.0]] for column, end in zip(values, ends, strict=True)]
            style: dict[str, Any] = {"color": look.color, "marker": look.marker, **BARS}
            sides = [[arm[side][0] for arm in arms] for side in (0, 1)]
            places, middle = [stage + shift for stage in stages], [mean(column) for column in values]
            at.errorbar(places, middle, yerr=sides, label=_words(method, same, roles[method]), **style)
            near = [(other, name) for name, other in last.items() if abs(other - end) < 8]
            up = 6 * sum((end, method) > label for label in near) - 6 * sum((end, method) < label for label in near)
            label_style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "color": look.color, "fontsize": 9}
            at.annotate(f"{end:.0f}", (len(order) + 0.25, end), xytext=(4, up), **label_style)
        if task in level:
            at.axhline(level[task], linestyle=":", color=REFERENCE, label="majority label")
        at.set_title(plain(task, 18), fontsize="medium")
        at.set(xlim=(0.6, len(order) + 0.9), xticks=range(1, len(order) + 1))
        at.grid(alpha=0.25)
    for at in axes[len(order) :]:
        at.set_visible(False)
    axes[0].set_ylabel("accuracy on the task, %")
    of_order = "" if grid.one_order else f" in {order_label(order)}, without the other orders"
    figure.supxlabel(f"tasks trained so far{of_order}", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    columns = len(labels) if sum(map(len, labels)) < FITTING else 2
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)
    return figure


def roles_of(runs: Sequence[Run], reference: str | None = None) -> dict[str, str]:
    """Return the methods of the first figure and what each stands for; of the user's own at most OWN, those with the highest AA."""
    means = {method: mean([run.record.scores.AA for run in group]) for method, group in by_method(runs).items()}
    own = sorted((method for method in means if method not in METHODS), key=lambda method: -means[method])
    without, within = unprotected_method(runs), exact_methods(runs)
    roles = {reference: "reference"} if reference in means else {without: "unprotected"} if without else {}
    roles |= {method: "protected" if without else "accuracy" for method in within[:1] if method not in roles}
    roles |= {method: "own method" for method in own[:OWN] if method not in roles}
    return roles or {next(iter(means)): "accuracy"}


def _words(method: str, runs: Sequence[Run], role: str) -> str:
    """A method's name, with what it stands for in the figure."""
    return f"{named(method)} ({role}{f', mean of {len(runs)} runs' if len(runs) > 1 else ''})"


def _interval(runs: Sequence[Run], task: str, values: Sequence[float], answered: str) -> tuple[float, float] | None:
    """The interval of a mean: over runs or, of one, over the examples whose answers are known ("AA" at the end, "LA" at first)."""
    if len(runs) == 1 and runs[0].answers:
        known = [right for (of, _), right in runs[0].answers.get(answered, {}).items() if of == task]
        return share_interval(sum(known), len(known)) if known else None
    return mean_interval(values)


def share_interval(right: int, tested: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, percent."""
    z, share = 1.959964, right / tested
    middle = (share + z**2 / (2 * tested)) / (1 + z**2 / tested)
    half = z / (1 + z**2 / tested) * math.sqrt(share * (1 - share) / tested + z**2 / (4 * tested**2))
    return 100 * (middle - half), 100 * (middle + half)


def heat_maps(runs: Sequence[Run], looks: PlotStyles) -> Figure:
    """Draw the accuracy of each task (rows) after each stage (columns), a map for each method, all on one scale. Cells are means
    over runs. With a single order, rows are tasks; with several, they are the first task learned, the second, ..
    """
    grid, size, names = Grid(runs), len(runs[0].order), list(by_method(runs))
    across = max(1, min(len(names), 20 // (size + 1)))
    down = -(-len(names) // across)
    figure, ((at,),) = canvas((WIDTH if across * (size + 1) > 9 else 5.4, 1.0 + down * (size + 1.4) * 0.33))
    every = [value for run in runs for row in run.record.accuracy for value in row]
    low, high = 10 * math.floor(min(every) / 10), 10 * math.ceil(max(every) / 10 + 1e-9)
    for number, method in enumerate(names):
        left, top = (number % across) * (size + 1), -(number // across) * (size + 1.6)
        triangles = [run.record.accuracy for run in grid.of_method(method)]
        cells = [[mean([a[t][i] for a in triangles]) if i <= t else None for t in range(size)] for i in range(size)]
        known = [[math.nan if value is None else value for value in row] for row in cells]
        corners = [left + stage for stage in range(size + 1)], [top - i for i in range(size + 1)]
        image = at.pcolormesh(*corners, known, cmap="viridis", vmin=low, vmax=high, edgecolor="white", linewidth=0.5)
        at.text(left, top + 0.2, plain(method, 5 * size + 4), fontsize=8 if len(method) <= 20 else 7, va="bottom")
        for i, row in enumerate(cells if size <= NUMBERED else []):
            for stage, value in enumerate(row):
                if value is not None:
                    color = "white" if value < low + 0.6 * (high - low) else "black"
                    at.text(left + stage + 0.5, top - i - 0.5, f"{value:.0f}", fontsize=7, ha="center", va="center", color=color)
    tasks = runs[0].order if grid.one_order else [f"task {i + 1}" for i in range(size)]
    ups = [-(row * (size + 1.6)) - i - 0.5 for row in range(down) for i in range(size)]
    rights = [column * (size + 1) + stage + 0.5 for column in range(across) for stage in range(size)]
    at.set_yticks(ups, [plain(task, 14) for task in tasks] * down, fontsize=7)
    at.set_xticks(rights, [str(stage + 1) for stage in range(size)] * across, fontsize=7)
    at.set(xlabel="tasks trained so far", xlim=(-0.1, across * (size + 1) - 0.9), ylim=(-down * (size + 1.6) + 1.4, 1.2))
    at.tick_params(length=0)
    at.spines[:].set_visible(False)
    figure.colorbar(image, ax=at, label="accuracy, %", fraction=0.03, pad=0.01)
    return figure
