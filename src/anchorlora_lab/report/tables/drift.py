"""Tables of drift: how far each task moved protected directions (its own core, the first, all past ones) and held-out rows.

Endpoints of the two-task mechanism trace: the last recorded point of each run, mean and standard deviation over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from anchorlora.pages import record as record_tables
from anchorlora.pages.record import PAPER
from anchorlora.pages.table import Column, Table
from anchorlora_lab.report.grid import METHOD, Grid, Measure, N, average, by_methods, means, pivot, spread
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.published import beside, printed_endpoint, printed_violation_sd
from anchorlora_lab.report.records import FAMILIES, Family, Run, by_method


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
    return by_methods("cores", title, Grid.of(runs), [kept, *measures])


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
    grid, fields = Grid.of(runs), FIELDS[family]
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
    grid, fields = Grid.of(runs), FIELDS[family]
    measures = [METHOD, N, *((Column(HEADINGS[field], "g"), spread(partial(endpoint, field=field))) for field in fields)]
    title = f"Mechanism endpoints, {FAMILIES[family]}: standard deviations over seeds"
    table = pivot(f"mechanism-{family}-sd", title, grid.groups, measures, NOTES["mechanism-sd"], grid.partial).noting(grid.note)
    return _beside(table, grid, fields, "_std")


def violation_table(runs: Sequence[Run]) -> Table | None:
    """Motion on protected directions in the last optimizer step, before and after projection."""
    grid = Grid.of([run for run in runs if endpoint(run, "wrp_before") is not None])
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
