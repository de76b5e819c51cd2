"""Endpoints of the two-task mechanism trace: the last recorded point of each run, mean and standard deviation over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anchorlora.reports.grid import Grid
from anchorlora.reports.orders import is_paper_trace
from anchorlora.reports.published import printed_endpoint, printed_violation_sd
from anchorlora.reports.records import FAMILIES, Family, Run, deviation_of, mean, mean_of
from anchorlora.reports.tables.beside import beside
from anchorlora.reports.tables.form import Cell, Column, Table

FIELDS: dict[Family, tuple[str, ...]] = {
    "shared": ("d_eff", "d_old", "rho", "d_new"),
    "cumulative": ("d_eff", "d_old", "rho", "d_block"),
}
HEADINGS = {"d_eff": "D_eff", "d_old": "D_old", "rho": "rho", "d_new": "D_new", "d_block": "D_block"}
MEANING = (
    "Norms in native units, rho as a fraction. D_eff: size of the task's change; D_old: its part on protected directions; "
    "rho: D_old / D_eff; D_new: its part off them; D_block: change of the task's own block; chance: rho of an unaligned change; "
    "zero is: the largest rho that counts as none."
)


def endpoint(run: Run, field: str) -> float | None:
    """A field of a trace's last point."""
    return getattr(run.trace[-1], field)


def endpoint_table(runs: Sequence[Run], *, family: Family) -> Table:
    """Means over seeds."""
    grid, fields = Grid.of(runs), FIELDS[family]
    more = (Column("protected"), Column("chance", "g"), Column("zero is", "e"))
    columns = (Column("method"), Column("cells"), *(Column(HEADINGS[f], "g") for f in fields), *more)
    rows = []
    for method in grid.methods:
        mine = grid.of_method(method)
        kept = f"{sum(run.trace[-1].exact for run in mine)} of {len(mine)}"
        chance, bound = mean_of(endpoint(run, "chance") for run in mine), mean([run.trace[-1].bound for run in mine])
        rows.append((method, grid.count(method), *(mean_of(endpoint(run, f) for run in mine) for f in fields), kept, chance, bound))
    title = f"Mechanism endpoints, {FAMILIES[family]}: {_where(runs)}"
    table = Table(f"mechanism-{family}", title, columns, tuple(rows), MEANING, grid.partial)
    return _beside(table, grid, lambda method, f: printed_endpoint(method, f), dict(zip(fields, fields, strict=True)))


def endpoint_deviations(runs: Sequence[Run], *, family: Family) -> Table:
    """Sample standard deviations over seeds."""
    grid, fields = Grid.of(runs), FIELDS[family]
    columns = (Column("method"), Column("n"), *(Column(HEADINGS[f], "g") for f in fields))
    rows: list[tuple[Cell, ...]] = []
    for method in grid.methods:
        mine = grid.of_method(method)
        rows.append((method, len(mine), *(deviation_of(endpoint(run, f) for run in mine) for f in fields)))
    title = f"Mechanism endpoints, {FAMILIES[family]}: standard deviations over seeds"
    note = "Sample standard deviation (ddof 1) over the n seeds; norms in native units, rho as a fraction."
    table = Table(f"mechanism-{family}-sd", title, columns, tuple(rows), note, grid.partial)
    return _beside(table, grid, printed_endpoint, {f: f"{f}_std" for f in fields})


def violation_table(runs: Sequence[Run]) -> Table:
    """What the last optimizer step moved on protected directions, before and after projection."""
    grid = Grid.of([run for run in runs if endpoint(run, "wrp_before") is not None])
    columns = (Column("method"), Column("cells"), *(Column(name, "e") for name in ("before", "before sd", "after", "after sd")))
    rows = []
    for method in grid.methods:
        found = [[endpoint(run, f"wrp_{when}") for run in grid.of_method(method)] for when in ("before", "after")]
        rows.append((method, grid.count(method), *(f(values) for values in found for f in (mean_of, deviation_of))))
    note = (
        "|(A_new - A_before) V| of the trace's last step, native units: as the optimizer made it, and after weight residual "
        "projection (equal for methods without it); sd over seeds (ddof 1)."
    )
    table = Table("violations", f"Violation of the routing factor: {_where(runs)}", columns, tuple(rows), note, grid.partial)
    values = {
        f"{ours} sd": [printed_violation_sd(m, theirs) if is_paper_trace(runs[0].order) else None for m in grid.methods]
        for ours, theirs in (("before", "pre"), ("after", "post"))
    }
    return beside(table.noting(grid.note), values, runs)


def _beside(table: Table, grid: Grid, printed: Callable[[str, str], float | None], fields: dict[str, str]) -> Table:
    fits = is_paper_trace(grid.runs[0].order)
    values = {HEADINGS[f]: [printed(m, theirs) if fits else None for m in grid.methods] for f, theirs in fields.items()}
    return beside(table.noting(grid.note), values, grid.runs)


def _where(runs: Sequence[Run]) -> str:
    return f"{' -> '.join(runs[0].order)}, step {runs[0].trace[-1].step}"
