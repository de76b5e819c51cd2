"""What each task did to protected directions: of its own core, of the first, of all past cores, and to rows that made no core."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.record import DriftFacts
from anchorlora.reports.grid import Grid
from anchorlora.reports.orders import order_label
from anchorlora.reports.records import Run, by_method, mean_of
from anchorlora.reports.tables.form import Cell, Column, Table

NOTE = (
    "rho: share of a task's change on the core used during it; zero is: the largest rho that float32 storage explains; "
    "chance: what an unaligned change would read; first, union: the same share on the first task's core and on all past cores; "
    "held-out: change of past feature rows that no core was made from, relative to them."
)
CORES_NOTE = (
    "Means over cells, at the end of the last task. protected: tasks, of all from the second on, whose rho on their own core "
    "counts as zero; rho: on the core used during the task, on the first task's core, and on the union of all past cores; "
    "held-out: rms change of past feature rows that no core was made from, relative to them, and of the parts of "
    "these rows inside and outside the core (fractions); chance: rho of an unaligned change."
)
COLUMNS = (
    Column("method"),
    Column("order"),
    Column("seed"),
    Column("after"),
    Column("rho", "e"),
    Column("zero is", "e"),
    Column("protected"),
    Column("chance", "g"),
    Column("rho first", "e"),
    Column("rho union", "e"),
    Column("held-out", "g"),
    Column("D_eff", "g"),
    Column("D_old", "e"),
)


def drift_table(runs: Sequence[Run]) -> Table:
    """One row a run and task."""
    cells = [run for mine in by_method(runs).values() for run in mine]
    rows = tuple(_row(run, drift) for run in cells for drift in run.record.drift)
    table = Table("drift", "Drift on protected directions", COLUMNS, rows, NOTE)
    return table if len({run.order for run in runs}) > 1 else table.without("order")


def _row(run: Run, drift: DriftFacts) -> tuple[Cell, ...]:
    return (
        run.method,
        order_label(run.order),
        run.seed,
        run.order[drift.task - 1],
        drift.rho,
        drift.bound,
        "yes" if drift.exact else "no",
        drift.chance,
        drift.rho_first,
        drift.rho_union,
        drift.held_out.total if drift.held_out else None,
        drift.d_eff,
        drift.d_old,
    )


def core_table(runs: Sequence[Run]) -> Table:
    """The last task's change on several sets of directions: means over cells.  The selected core is not the whole past."""
    grid = Grid.of(runs)
    headings = ("rho", "rho first", "rho union", "held-out", "on-core", "off-core")
    columns = (Column("method"), Column("cells"), Column("protected"), *(Column(h, "g") for h in headings), Column("chance", "g"))
    rows = []
    for method in grid.methods:
        mine = grid.of_method(method)
        every, last = [d for run in mine for d in run.record.drift], [run.record.drift[-1] for run in mine]
        held = [[getattr(d.held_out, part) if d.held_out else None for d in last] for part in ("total", "on_core", "off_core")]
        ratios = [[d.rho for d in last], [d.rho_first for d in last], [d.rho_union for d in last]]
        kept = f"{sum(d.exact for d in every)} of {len(every)}"
        rows.append((method, grid.count(method), kept, *map(mean_of, (*ratios, *held)), mean_of(d.chance for d in last)))
    title = "The last task on current, first and all past cores"
    return Table("cores", title, columns, tuple(rows), CORES_NOTE, grid.partial).noting(grid.note)
