"""Figures of every task at every stage: an unprotected method beside a protected one, and a heat map of each method."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from anchorlora.methods import METHODS
from anchorlora_lab.report.figures.style import REFERENCE, Looks, beside_each_other, named, plain
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.paired_tests import mean_interval
from anchorlora_lab.report.records import FAMILIES, Run, by_method, mean, mean_of
from anchorlora_lab.report.tables.references import PLAIN, References

WIDTH = 8.2  # inches; 800 pixels at the size of a page's column
FITTING = 96  # letters of a legend that fit one line
OWN = 3  # methods of the user's own in the first figure
NUMBERED = 8  # tasks that leave room for a number in each cell


def unprotected_of(runs: Sequence[Run]) -> str | None:
    """Return the method that protects nothing: seq-lora, or else the first that is a baseline of the catalog."""
    plain = [list(METHODS.baseline(family).phrases) for family in FAMILIES]
    bare = [method for method, mine in by_method(runs).items() if all(run.record.method.parts in plain for run in mine)]
    return PLAIN if PLAIN in bare else next(iter(bare), None)


def protected_of(runs: Sequence[Run]) -> list[str]:
    """Return the methods whose rho counts as zero after every task of every run, from the highest mean AA to the lowest."""
    kept = [(method, mine) for method, mine in by_method(runs).items() if all(run.record.drift for run in mine)]
    exact = [(method, mine) for method, mine in kept if all(drift.exact for run in mine for drift in run.record.drift)]
    return [method for method, mine in sorted(exact, key=lambda each: -mean([run.record.scores.AA for run in each[1]]))]


def task_by_task(runs: Sequence[Run], looks: Looks, reference: str | None = None) -> Figure:
    """Draw the accuracy of every task, from when it was learned to the end, without protection and with it: one panel a task.

    Protected is the method with the highest AA of those whose rho counts as zero after every task. The user's own methods, those
    that are not in the catalog, stand beside the two, and a reference in place of the unprotected method. Means are over the seeds
    of the first order, with 95 % intervals: over runs where there are six, over test examples where there is one run that has its
    predictions. A dotted line is the majority label.
    """
    order, grid = Grid.of(runs).orders[0], Grid.of(runs)
    roles = roles_of(runs, reference)
    mine = {method: [run for run in grid.of_method(method) if run.order == order] for method in roles}
    level = References.of(runs).majority
    figure = Figure(figsize=(WIDTH, 3.6 * -(-len(order) // 5)), layout="constrained")
    axes = figure.subplots(-(-len(order) // 5), min(len(order), 5), sharex=True, sharey=True, squeeze=False).flatten()
    for i, (at, task) in enumerate(zip(axes, order, strict=False)):
        last = {method: mean([run.record.accuracy[-1][i] for run in same]) for method, same in mine.items() if same}
        for shift, (method, end) in zip(beside_each_other(len(last), width=0.3), last.items(), strict=True):
            look, same, stages = looks[method], mine[method], range(i + 1, len(order) + 1)
            values = [[run.record.accuracy[stage - 1][i] for run in same] for stage in stages]
            reach = [_reach(same, task, each, first=k == 0, last=k == len(values) - 1) for k, each in enumerate(values)]
            style = {"color": look.color, "marker": look.marker, "markersize": 6, "linewidth": 2, "capsize": 3, "elinewidth": 1}
            sides = [list(side) for side in zip(*reach, strict=True)]
            places, middle = [stage + shift for stage in stages], [mean(each) for each in values]
            at.errorbar(places, middle, yerr=sides, label=_words(method, same, roles[method]), **style)
            near = [(other, name) for name, other in last.items() if abs(other - end) < 8]
            up = 6 * sum((end, method) > each for each in near) - 6 * sum((end, method) < each for each in near)
            told = {"textcoords": "offset points", "va": "center", "color": look.color, "fontsize": 9}
            at.annotate(f"{end:.0f}", (len(order) + 0.25, end), xytext=(4, up), **told)
        if task in level:
            at.axhline(level[task], linestyle=":", color=REFERENCE, label="majority label")
        at.set_title(plain(task, 18), fontsize="medium")
        at.set(xlim=(0.6, len(order) + 0.9), xticks=range(1, len(order) + 1))
        at.grid(alpha=0.25)
    for at in axes[len(order) :]:
        at.set_visible(False)
    axes[0].set_ylabel("accuracy on the task, %")
    figure.supxlabel("tasks trained so far", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    columns = len(labels) if sum(map(len, labels)) < FITTING else 2
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)
    return figure


def roles_of(runs: Sequence[Run], reference: str | None = None) -> dict[str, str]:
    """Return the methods of the first figure and what each stands for; of the user's own at most OWN, those with the highest AA."""
    means = {method: mean([run.record.scores.AA for run in mine]) for method, mine in by_method(runs).items()}
    own = sorted((method for method in means if method not in METHODS), key=lambda method: -means[method])
    without, within = unprotected_of(runs), protected_of(runs)
    roles = {reference: "reference"} if reference in means else {without: "unprotected"} if without else {}
    roles |= {method: "protected" if without else "accuracy" for method in within[:1] if method not in roles}
    roles |= {method: "own method" for method in own[:OWN] if method not in roles}
    return roles or {next(iter(means)): "accuracy"}


def _words(method: str, runs: Sequence[Run], role: str) -> str:
    """A method's name, with what it stands for in the figure."""
    return f"{named(method)} ({role}{f', mean of {len(runs)} runs' if len(runs) > 1 else ''})"


def _reach(runs: Sequence[Run], task: str, values: Sequence[float], *, first: bool, last: bool) -> tuple[float, float]:
    """How far the interval of a mean goes down and up: over runs, or, of one run, over the examples whose answers are known."""
    interval = mean_interval(values)
    if len(runs) == 1 and (first or last) and runs[0].answers:
        known = [right for (of, _), right in runs[0].answers["AA" if last else "LA"].items() if of == task]
        interval = share_interval(sum(known), len(known)) if known else None
    if interval is None:
        return 0.0, 0.0
    return max(mean(values) - interval[0], 0.0), max(interval[1] - mean(values), 0.0)


def share_interval(right: int, tested: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, percent."""
    z, share = 1.959964, right / tested
    middle = (share + z**2 / (2 * tested)) / (1 + z**2 / tested)
    half = z / (1 + z**2 / tested) * math.sqrt(share * (1 - share) / tested + z**2 / (4 * tested**2))
    return 100 * (middle - half), 100 * (middle + half)


def heat_maps(runs: Sequence[Run], looks: Looks) -> Figure:
    """Draw the accuracy of each task (rows) after each stage (columns), a map for each method, all on one scale.

    Cells are means over runs. With a single order, rows are tasks; with several, they are the first task learned, the second, ..
    """
    grid, size, names = Grid.of(runs), len(runs[0].order), list(by_method(runs))
    across = max(1, min(len(names), 20 // (size + 1)))
    down = -(-len(names) // across)
    figure = Figure(figsize=(WIDTH if across * (size + 1) > 9 else 5.4, 1.0 + down * (size + 1.4) * 0.33), layout="constrained")
    at = figure.subplots()
    colors = matplotlib.colormaps["viridis"]
    every = [value for run in runs for row in run.record.accuracy for value in row]
    low, high = 10 * math.floor(min(every) / 10), 10 * math.ceil(max(every) / 10 + 1e-9)
    for number, method in enumerate(names):
        left, top = (number % across) * (size + 1), -(number // across) * (size + 1.6)
        cells = [[mean_of(_cell(run, stage, i) for run in grid.of_method(method)) for stage in range(size)] for i in range(size)]
        known = [[math.nan if value is None else value for value in row] for row in cells]
        corners = [left + stage for stage in range(size + 1)], [top - i for i in range(size + 1)]
        image = at.pcolormesh(*corners, known, cmap=colors, vmin=low, vmax=high, edgecolor="white", linewidth=0.5)
        at.text(left, top + 0.2, plain(method, 5 * size + 4), fontsize=8 if len(method) <= 20 else 7, va="bottom")
        for i, row in enumerate(cells if size <= NUMBERED else []):
            for stage, value in enumerate(row):
                if value is not None:
                    dark = value < low + 0.6 * (high - low)
                    at.text(
                        left + stage + 0.5,
                        top - i - 0.5,
                        f"{value:.0f}",
                        fontsize=7,
                        ha="center",
                        va="center",
                        color="white" if dark else "black",
                    )
    tasks = runs[0].order if grid.one_order else [f"task {i + 1}" for i in range(size)]
    at.set_yticks(
        [-(row * (size + 1.6)) - i - 0.5 for row in range(down) for i in range(size)],
        [plain(task, 14) for task in tasks] * down,
        fontsize=7,
    )
    at.set_xticks(
        [column * (size + 1) + stage + 0.5 for column in range(across) for stage in range(size)],
        [str(stage + 1) for _ in range(across) for stage in range(size)],
        fontsize=7,
    )
    at.set(xlabel="tasks trained so far", xlim=(-0.1, across * (size + 1) - 0.9), ylim=(-down * (size + 1.6) + 1.4, 1.2))
    at.tick_params(length=0)
    at.spines[:].set_visible(False)
    figure.colorbar(image, ax=at, label="accuracy, %", fraction=0.03, pad=0.01)
    return figure


def _cell(run: Run, stage: int, task: int) -> float | None:
    """The accuracy of the task learned at a place, after a stage."""
    row = run.record.accuracy[stage]
    return row[task] if task < len(row) else None
