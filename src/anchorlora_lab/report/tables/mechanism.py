"""Tables of how methods act: gradients of task and penalty and how far factors move, how far each task moved protected directions
(its own core, the first, all past ones) and held-out rows, and forgetting against drift over all runs.

Endpoints of the two-task mechanism trace: the last recorded point of each run, mean and standard deviation over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from anchorlora.pages import record as record_tables
from anchorlora.pages.record import PAPER, order_label
from anchorlora.pages.table import Column, Table
from anchorlora.store.record import DriftFacts
from anchorlora_lab.report.grid import METHOD, Grid, Measure, N, average, by_methods, means, pivot, spread
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.published import beside, printed_endpoint, printed_violation_sd
from anchorlora_lab.report.records import FAMILIES, Family, Run, TracePoint, by_method, mean, mean_of
from anchorlora_lab.report.tables.scores import ends

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
    grid = Grid([run for run in runs if gradients_of(run)])
    if not grid.runs:
        return None
    values: dict[str, Callable[[Run], float | None]] = {
        **{f"{name}, {end}": partial(_norm, name=name, end=end) for name in ("task", "penalties") for end in ("first", "last")},
        "penalties / task": lambda run: mean(map(ratio, gradients_of(run))),
        **{f"moved {name}": lambda run, name=name: getattr(run.trace[-1].moves, name, None) for name in "AB"},  # type: ignore[misc]
    }
    measures: list[Measure] = [METHOD, (Column("runs"), lambda group: grid.count(group[0].method)), *means(values, "g")]
    table = pivot("gradients", "Gradients of task and penalties", grid.groups, measures, partial=grid.partial)
    return table if any(row[-1] is not None for row in table.rows) else table.without("moved A").without("moved B")


def _norm(run: Run, *, name: str, end: str) -> float:
    """The mean norm over the first or last tenth of a run's points."""
    points = gradients_of(run)
    tenth = max(1, len(points) // 10)
    return mean([getattr(p.grad_norms, name) or 0.0 for p in (points[:tenth] if end == "first" else points[-tenth:])])


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
    grid, whole = Grid(runs), spots_of_runs(runs)
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
    a, b = _ranks(x, weights), _ranks(y, weights)
    total = weights.sum(axis=1, keepdims=True)
    a, b = (r - (weights * r).sum(axis=1, keepdims=True) / total for r in (a, b))
    both, one, other = ((weights * product).sum(axis=1) for product in (a * b, a * a, b * b))
    with np.errstate(invalid="ignore", divide="ignore"):
        return both / np.sqrt(one * other)


def _ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Middle ranks of the points under each row of weights; equal values share one."""
    distinct, group = np.unique(values, return_inverse=True)
    sizes = np.zeros((len(weights), len(distinct)))
    np.add.at(sizes.T, group, weights.T)
    return (np.cumsum(sizes, axis=1) - sizes / 2)[:, group]


def drift_table(runs: Sequence[Run]) -> Table:
    """Drift of every run and task, one row each."""
    return record_tables.drift_table([run.record for group in by_method(runs).values() for run in group])


def core_table(runs: Sequence[Run]) -> Table:
    """The last task's change on several sets of directions: means over runs.  One selected core is not the whole past."""
    shares = {"rho": "rho", "rho first": "rho_first", "rho union": "rho_union"}
    held_out = {"held-out": "held_out.total", "on-core": "held_out.on_core", "off-core": "held_out.off_core"}
    paths = shares | held_out | {"chance": "chance"}
    measures = means({heading: partial(_of_last, path=path) for heading, path in paths.items()}, "g")
    kept: Measure = (Column("protected"), lambda group: _count([d.exact for run in group for d in run.record.drift]))
    title = "The last task on the current core, the first core, and all past cores"
    return by_methods("cores", title, Grid(runs), [kept, *measures])


FIELDS: dict[Family, tuple[str, ...]] = {
    "shared": ("d_eff", "d_old", "rho", "d_new"),
    "cumulative": ("d_eff", "d_old", "rho", "d_block"),
}
HEADINGS = {"d_eff": "D_eff", "d_old": "D_old", "rho": "rho", "d_new": "D_new", "d_block": "D_block"}


def endpoint(run: Run, field: str) -> float | None:
    """Return a field of a trace's last point."""
    return getattr(run.trace[-1], field)


def endpoint_table(runs: Sequence[Run], *, family: Family) -> Table:
    """Endpoints of traces: means over seeds."""
    grid, fields = Grid(runs), FIELDS[family]
    measures: list[Measure] = [
        *means({HEADINGS[field]: partial(endpoint, field=field) for field in fields}, "g"),
        (Column("protected"), lambda group: _count([run.trace[-1].exact for run in group])),
        *means({"chance": partial(endpoint, field="chance")}, "g"),
        *means({"tolerance": partial(endpoint, field="bound")}, "e"),
    ]
    title = f"Mechanism endpoints, {FAMILIES[family]}: {_where(runs)}"
    table = by_methods(f"mechanism-{family}", title, grid, measures, NOTES["mechanism"])
    return _beside(table, grid, fields)


def endpoint_deviations(runs: Sequence[Run], *, family: Family) -> Table:
    """Sample standard deviations of the endpoints over seeds."""
    grid, fields = Grid(runs), FIELDS[family]
    measures = [METHOD, N, *((Column(HEADINGS[field], "g"), spread(partial(endpoint, field=field))) for field in fields)]
    title = f"Mechanism endpoints, {FAMILIES[family]}: standard deviations over seeds"
    table = pivot(f"mechanism-{family}-sd", title, grid.groups, measures, NOTES["mechanism-sd"], grid.partial).noting(grid.note)
    return _beside(table, grid, fields, "_std")


def violation_table(runs: Sequence[Run]) -> Table | None:
    """Motion on protected directions in the last optimizer step, before and after projection."""
    grid = Grid([run for run in runs if endpoint(run, "wrp_before") is not None])
    if not grid.runs:
        return None
    fields = {when: partial(endpoint, field=f"wrp_{when}") for when in ("before", "after")}
    kinds = (("", average), (" sd", spread))
    measures = [(Column(f"{when}{sd}", "e"), of(field)) for when, field in fields.items() for sd, of in kinds]
    table = by_methods("violations", f"Violation by the routing factor A: {_where(runs)}", grid, measures)
    values = {
        f"{ours} sd": [printed_violation_sd(m, paper) if is_paper_trace(runs[0].order) else None for m in grid.methods]
        for ours, paper in (("before", "pre"), ("after", "post"))
    }
    return beside(table, values, runs)


def _beside(table: Table, grid: Grid, fields: Sequence[str], std: str = "") -> Table:
    fits = is_paper_trace(grid.runs[0].order)
    values = {HEADINGS[f]: [printed_endpoint(m, f"{f}{std}") if fits else None for m in grid.methods] for f in fields}
    return beside(table, values, grid.runs)


def _of_last(run: Run, *, path: str) -> float | None:
    value: Any = run.record.drift[-1]
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _where(runs: Sequence[Run]) -> str:
    return f"{' -> '.join(runs[0].order)}, step {runs[0].trace[-1].step}"


def _count(kept: Sequence[bool]) -> str:
    return f"{sum(kept)} of {len(kept)}"


def is_paper_trace(order: Sequence[str]) -> bool:
    """Tell whether an order is that of the paper's mechanism trace: the first two tasks of order1."""
    return tuple(order) == PAPER["order1"][:2]
