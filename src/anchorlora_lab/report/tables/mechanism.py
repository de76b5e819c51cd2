"""Tables of how methods act: gradients of task and penalty and how far factors move, and forgetting against drift over all runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.pages.record import order_label
from anchorlora.pages.table import Column, Table
from anchorlora.store.record import DriftFacts
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.records import Run, TracePoint, by_method, mean, mean_of
from anchorlora_lab.report.tables.scores import ends

if TYPE_CHECKING:
    import numpy as np

DRAWS = 2000
FEWEST = 6  # pairs of order and seed below which a bootstrap over them says nothing
METHODS = 4  # methods below which a correlation over runs is one over a few clouds


def gradients_of(run: Run) -> list[TracePoint]:
    """Return the points of a trace at which the norm of the task's gradient was recorded."""
    return [point for point in run.trace if point.grad_norms is not None and point.grad_norms.task]


def ratio(point: TracePoint) -> float:
    """Return the norm of the penalties' gradient over that of the task's; 0 without penalties."""
    assert point.grad_norms is not None
    assert point.grad_norms.task
    return (point.grad_norms.penalties or 0.0) / point.grad_norms.task


def gradient_table(runs: Sequence[Run]) -> Table | None:
    """Gradient norms of the first and last tenth of the steps, and how far A and B have moved at the end: means over runs."""
    known = [run for run in runs if gradients_of(run)]
    if not known:
        return None
    grid, rows = Grid.of(known), []
    for method, group in by_method(known).items():
        tenths = [(p[: max(1, len(p) // 10)], p[-max(1, len(p) // 10) :]) for p in map(gradients_of, group)]
        norms = [
            mean([mean([_norm(point, name) for point in part[end]]) for part in tenths])
            for name in ("task", "penalties")
            for end in (0, 1)
        ]
        moves = [run.trace[-1].moves for run in group]
        moved = [mean_of(None if m is None else getattr(m, name) for m in moves) for name in "AB"]
        ratios = [mean([ratio(point) for point in gradients_of(run)]) for run in group]
        rows.append((method, grid.count(method), *norms, mean(ratios), *moved))
    headings = ("task, first", "task, last", "penalties, first", "penalties, last", "penalties / task", "moved A", "moved B")
    columns = (Column("method"), Column("runs"), *(Column(name, "g") for name in headings))
    table = Table("gradients", "Gradients of task and penalties", columns, tuple(rows), NOTES["gradients"], grid.partial)
    return table if any(row[-1] is not None for row in rows) else table.without("moved A").without("moved B")


def _norm(point: TracePoint, name: str) -> float:
    assert point.grad_norms is not None
    return getattr(point.grad_norms, name) or 0.0


@dataclass(frozen=True)
class DriftPoint:
    """A run, or one boundary of it, as a point of forgetting against drift."""

    run: Run
    lost: float  # FM of the run, or what earlier tasks lost during this task: percentage points
    drift: dict[str, float | None]  # each of AGAINST, of that task or the mean over tasks
    exact: bool  # whether rho is within the numerical tolerance, of all tasks for a run


AGAINST: dict[str, Callable[[DriftFacts], float | None]] = {
    "rho": lambda drift: drift.rho,  # on the core used
    "held-out": lambda drift: drift.held_out.total if drift.held_out else None,  # relative change of held-out past rows
    "D_eff": lambda drift: drift.d_eff,  # size of the change
    "predicted KL": lambda drift: drift.predicted_kl,  # forecast change of earlier answers; None without what it needs
}


def _spot(run: Run, lost: float, drift: Sequence[DriftFacts]) -> DriftPoint:
    return DriftPoint(run, lost, {name: mean_of(map(of, drift)) for name, of in AGAINST.items()}, all(d.exact for d in drift))


def spots_of_runs(runs: Sequence[Run]) -> list[DriftPoint]:
    """Return one point per run: FM, against means over the tasks from the second on."""
    known = [(run, lost) for run in runs if run.record.drift and (lost := run.record.scores.FM) is not None]
    return [_spot(run, lost, run.record.drift) for run, lost in known]


def spots_of_boundaries(runs: Sequence[Run]) -> list[DriftPoint]:
    """Return one point per run and task from the second on: what earlier tasks lost in it, against its own drift."""
    spots = []
    for run in runs:
        for drift in run.record.drift:
            before, after = run.record.accuracy[drift.task - 2], run.record.accuracy[drift.task - 1]
            spots.append(_spot(run, mean([was - now for was, now in zip(before, after, strict=False)]), [drift]))
    return spots


def correlation_table(runs: Sequence[Run]) -> Table | None:
    """Rank correlation of forgetting with rho, the change of held-out rows, its size, and the predicted KL, with intervals."""
    grid, whole = Grid.of(runs), spots_of_runs(runs)
    if len({spot.run.method for spot in whole}) < METHODS or len({(s.run.order, s.run.seed) for s in whole}) < FEWEST:
        return None
    scopes = {"all runs": whole, "methods that are not exact": [spot for spot in whole if not spot.exact]}
    if not grid.one_order:
        scopes |= {f"{order_label(order)} alone": [spot for spot in whole if spot.run.order == order] for order in grid.orders}
    boundaries = spots_of_boundaries(runs)
    scopes |= {"all boundaries": boundaries, "boundaries, methods that are not exact": [s for s in boundaries if not s.exact]}
    rows = []
    for name, spots in scopes.items():
        for against in AGAINST:
            points = [(s.lost, x, (s.run.order, s.run.seed)) for s in spots if (x := s.drift[against]) is not None]
            if len(points) < METHODS:
                continue
            lost, xs, places = (list(part) for part in zip(*points, strict=True))
            correlation = rank_correlation(xs, lost, places)
            if correlation is not None:
                rows.append((name, against, len(points), correlation[0], ends(correlation[1], signed=True)))
    columns = (Column("points"), Column("against"), Column("n"), Column("Spearman", signed=True), Column("95 %"))
    predicted = NOTES["predicted KL"] if any(row[1] == "predicted KL" for row in rows) else ""
    return Table("forgetting", "Forgetting against drift", columns, tuple(rows), NOTES["forgetting"]).noting(predicted)


def rank_correlation(
    x: Sequence[float], y: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> tuple[float, tuple[float, float] | None] | None:
    """Return Spearman's correlation, and its 95 % interval by a bootstrap over clusters."""
    import numpy as np

    ones = np.ones((1, len(x)))
    (rho,) = _correlations(np.asarray(x), np.asarray(y), ones)
    if not np.isfinite(rho):
        return None
    names = list(dict.fromkeys(clusters or ()))
    if len(names) < FEWEST:
        return round(float(rho), 12), None
    of = np.array([names.index(cluster) for cluster in clusters or ()])
    drawn = np.random.default_rng(0).multinomial(len(names), [1 / len(names)] * len(names), size=DRAWS)
    draws = _correlations(np.asarray(x), np.asarray(y), drawn[:, of].astype(float))
    low, high = np.nanquantile(draws, (0.025, 0.975))
    return round(float(rho), 12), (float(low), float(high))


def _correlations(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Spearman's correlation under each row of weights (draws, points), which say how often a point is there."""
    import numpy as np

    a, b = _ranks(x, weights), _ranks(y, weights)
    total = weights.sum(axis=1, keepdims=True)
    a, b = (r - (weights * r).sum(axis=1, keepdims=True) / total for r in (a, b))
    both, one, other = ((weights * product).sum(axis=1) for product in (a * b, a * a, b * b))
    with np.errstate(invalid="ignore", divide="ignore"):
        return both / np.sqrt(one * other)


def _ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Middle ranks of the points under each row of weights; equal values share one."""
    import numpy as np

    distinct, group = np.unique(values, return_inverse=True)
    sizes = np.zeros((len(weights), len(distinct)))
    np.add.at(sizes.T, group, weights.T)
    return (np.cumsum(sizes, axis=1) - sizes / 2)[:, group]
