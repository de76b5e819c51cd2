"""Trajectories of the two-task mechanism trace, and where they end: mean and one standard deviation over seeds, logarithmic."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anchorlora.reports.figures.style import REFERENCE, SMALLEST, Looks, drawable, panels, plain
from anchorlora.reports.records import Run, by_method, deviation, families_of, mean


def trajectories(runs: Sequence[Run], looks: Looks) -> Figure:
    """Top: rho over optimizer steps, step 0 omitted. Bottom: its last value with the percentage. One scale for all panels."""
    tasks = plain(" -> ".join(runs[0].order))
    with panels(runs, title=f"rho while the second task is learned: {tasks}", rows=2, height=4.2) as (figure, axes):
        for column, mine in enumerate(families_of(runs).values()):
            methods = by_method(mine)
            for place, (method, same) in enumerate(methods.items()):
                _curve(axes[0][column], method, same, place, looks)
                _end(axes[1][column], method, same, place, looks)
            _trace_references(axes[0][column], mine)
            axes[0][column].set(xlabel="optimizer step")
            axes[1][column].set_xticks(range(len(methods)), [plain(_two_lines(method)) for method in methods], fontsize="small")
            axes[1][column].set_xlim(-0.6, len(methods) - 0.4)
        _one_scale(axes)
    return figure


def _curve(at: Axes, method: str, runs: Sequence[Run], place: int, looks: Looks) -> None:
    points = [[point for point in run.trace if point.rho is not None] for run in runs]
    steps = [point.step for point in points[0]]
    values = [[drawable(p.rho) or SMALLEST for p in same] for same in zip(*points, strict=False)]
    middle, look = [mean(v) for v in values], looks[method]
    low, high = _band(values)
    every = max(1, len(steps) // 10)  # staggered, so that markers of curves that coincide do not
    marks = (place * every // 4 % every, every)
    at.plot(steps[: len(middle)], middle, color=look.color, marker=look.marker, markevery=marks, markersize=5, label=plain(method))
    at.fill_between(steps[: len(middle)], low, high, color=look.color, alpha=0.18, linewidth=0)


def _end(at: Axes, method: str, runs: Sequence[Run], place: int, looks: Looks) -> None:
    values, look = [drawable(run.trace[-1].rho) or SMALLEST for run in runs], looks[method]
    (low,), (high,) = _band([values])
    middle = mean(values)
    reach = [[middle - low], [high - middle]]
    at.errorbar([place], [middle], yerr=reach, color=look.color, marker=look.marker, markersize=8, capsize=4)
    at.annotate(f"{100 * middle:.3g} %", (place, high), xytext=(0, 6), textcoords="offset points", ha="center", fontsize="small")


def _band(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """One standard deviation to both sides; the lower edge stays drawable."""
    pairs = [(mean(v), deviation(v) or 0.0) for v in values]
    return [max(m - s, m / 10, SMALLEST) for m, s in pairs], [m + s for m, s in pairs]


def _trace_references(at: Axes, runs: Sequence[Run]) -> None:
    """The chance level and the largest value that counts as zero, means over runs, at every recorded step."""
    steps = [point.step for point in runs[0].trace if point.rho is not None]
    same = list(zip(*([p for p in run.trace if p.rho is not None] for run in runs), strict=False))
    chance = [mean([p.chance for p in points if p.chance] or [SMALLEST]) for points in same]
    bound = [mean([p.bound for p in points]) for points in same]
    at.plot(steps[: len(same)], chance, ":", color=REFERENCE, label="chance")
    at.plot(steps[: len(same)], bound, "--", color=REFERENCE, label="largest that counts as zero")


def _two_lines(method: str) -> str:
    """A long name broken at the hyphen nearest to its middle."""
    places = [i + 1 for i, letter in enumerate(method) if letter == "-"]
    if len(method) <= 12 or not places:
        return method
    middle = min(places, key=lambda place: abs(place - len(method) / 2))
    return f"{method[:middle]}\n{method[middle:]}"


def _one_scale(axes: Sequence[Sequence[Axes]]) -> None:
    every = [at for row in axes for at in row]
    for at in every:
        at.set_yscale("log")
    low, high = min(at.get_ylim()[0] for at in every), max(at.get_ylim()[1] for at in every)
    for at in every:
        at.set_ylim(low, high * 3)
    for row, name in zip(axes, ("rho", "rho at the last step"), strict=True):
        row[0].set_ylabel(name)
