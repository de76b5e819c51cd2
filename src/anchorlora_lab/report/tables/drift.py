"""Tables of drift: how far each task moved protected directions (its own core, the first, all past ones) and held-out rows.

Endpoints of the two-task mechanism trace: the last recorded point of each run, mean and standard deviation over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anchorlora.pages import record as record_tables
from anchorlora.pages.labels import is_paper_trace
from anchorlora.pages.table import Column, Table, Value
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.published import printed_endpoint, printed_violation_sd
from anchorlora_lab.report.records import FAMILIES, Family, Run, by_method, deviation_of, mean, mean_of
from anchorlora_lab.report.tables.paper import beside

CORES_NOTE = (
    "Means over runs, at the end of the last task. protected: number of tasks, from the second on, whose rho on their own core is "
    "within the numerical tolerance; rho, rho first, rho union: share of the change on the core used during the task, on the first "
    "task's core, and on the union of all past cores; held-out: relative rms change of past feature rows that no core was built "
    "from; on-core, off-core: the same for the parts of these rows inside and outside the core; chance: rho of an unaligned change."
)


def drift_table(runs: Sequence[Run]) -> Table:
    """Drift of every run and task, one row each.

    Args:
        runs: Finished runs.
    """
    return record_tables.drift_table([run.record for mine in by_method(runs).values() for run in mine])


def core_table(runs: Sequence[Run]) -> Table:
    """The last task's change on several sets of directions: means over runs.  One selected core is not the whole past.

    Args:
        runs: Runs of one study, each with drift.
    """
    grid = Grid.of(runs)
    headings = ("rho", "rho first", "rho union", "held-out", "on-core", "off-core")
    columns = (Column("method"), Column("runs"), Column("protected"), *(Column(h, "g") for h in headings), Column("chance", "g"))
    rows = []
    for method in grid.methods:
        mine = grid.of_method(method)
        every, last = [d for run in mine for d in run.record.drift], [run.record.drift[-1] for run in mine]
        held = [[getattr(d.held_out, part) if d.held_out else None for d in last] for part in ("total", "on_core", "off_core")]
        ratios = [[d.rho for d in last], [d.rho_first for d in last], [d.rho_union for d in last]]
        kept = f"{sum(d.exact for d in every)} of {len(every)}"
        rows.append((method, grid.count(method), kept, *map(mean_of, (*ratios, *held)), mean_of(d.chance for d in last)))
    title = "The last task on the current core, the first core, and all past cores"
    return Table("cores", title, columns, tuple(rows), CORES_NOTE, grid.partial).noting(grid.note)


FIELDS: dict[Family, tuple[str, ...]] = {
    "shared": ("d_eff", "d_old", "rho", "d_new"),
    "cumulative": ("d_eff", "d_old", "rho", "d_block"),
}
HEADINGS = {"d_eff": "D_eff", "d_old": "D_old", "rho": "rho", "d_new": "D_new", "d_block": "D_block"}
MEANING = (
    "Norms in native units, rho as a fraction. D_eff: size of the task's change; D_old: its part on protected directions; "
    "rho: D_old / D_eff; D_new: its part off them; D_block: change of the task's own block; protected: number of runs whose rho is "
    "within the tolerance; chance: rho of an unaligned change; tolerance: the largest rho that float32 rounding explains."
)


def endpoint(run: Run, field: str) -> float | None:
    """Return a field of a trace's last point."""
    return getattr(run.trace[-1], field)


def endpoint_table(runs: Sequence[Run], *, family: Family) -> Table:
    """Endpoints of traces: means over seeds.

    Args:
        runs: Traced runs of one family.
        family: "shared" or "cumulative", which decides the columns.
    """
    grid, fields = Grid.of(runs), FIELDS[family]
    more = (Column("protected"), Column("chance", "g"), Column("tolerance", "e"))
    columns = (Column("method"), Column("runs"), *(Column(HEADINGS[f], "g") for f in fields), *more)
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
    """Sample standard deviations of the endpoints over seeds.

    Args:
        runs: Traced runs of one family.
        family: "shared" or "cumulative", which decides the columns.
    """
    grid, fields = Grid.of(runs), FIELDS[family]
    columns = (Column("method"), Column("n"), *(Column(HEADINGS[f], "g") for f in fields))
    rows: list[tuple[Value, ...]] = []
    for method in grid.methods:
        mine = grid.of_method(method)
        rows.append((method, len(mine), *(deviation_of(endpoint(run, f) for run in mine) for f in fields)))
    title = f"Mechanism endpoints, {FAMILIES[family]}: standard deviations over seeds"
    note = "Sample standard deviation (ddof 1) over the n seeds; norms in native units, rho as a fraction."
    table = Table(f"mechanism-{family}-sd", title, columns, tuple(rows), note, grid.partial)
    return _beside(table, grid, printed_endpoint, {f: f"{f}_std" for f in fields})


def violation_table(runs: Sequence[Run]) -> Table:
    """Motion on protected directions in the last optimizer step, before and after projection.

    Args:
        runs: Traced runs; those without recorded violations are left out.
    """
    grid = Grid.of([run for run in runs if endpoint(run, "wrp_before") is not None])
    columns = (Column("method"), Column("runs"), *(Column(name, "e") for name in ("before", "before sd", "after", "after sd")))
    rows = []
    for method in grid.methods:
        found = [[endpoint(run, f"wrp_{when}") for run in grid.of_method(method)] for when in ("before", "after")]
        rows.append((method, grid.count(method), *(f(values) for values in found for f in (mean_of, deviation_of))))
    note = (
        "|(A_new - A_previous) V| of the trace's last step, in native units, before and after the method projects the step (equal "
        "for methods that do not project it); sd: sample standard deviation (ddof 1) over seeds."
    )
    table = Table("violations", f"Violation by the routing factor A: {_where(runs)}", columns, tuple(rows), note, grid.partial)
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
