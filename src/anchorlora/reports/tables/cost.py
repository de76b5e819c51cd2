"""What each method took: time, memory, parameters, and what it must keep of the past."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.reports.grid import Grid
from anchorlora.reports.records import Run, mean, mean_of
from anchorlora.reports.tables.form import Column, Table

COLUMNS = (
    Column("method"),
    Column("cells"),
    Column("train s", 1),
    Column("ms a step", 1),
    Column("evaluate s", 1),
    Column("peak MB", 0),
    Column("trained"),
    Column("stored"),
    Column("history kB", 1),
)
NOTE = (
    "Means over cells. ms a step: training time by optimizer steps; peak: memory of the process, or of the GPU where one is "
    "used; trained, stored: LoRA parameters in and after the last task; history: what the method itself needs of the past."
)


def step_seconds(run: Run) -> float | None:
    """Seconds an optimizer step, over all tasks; None where the protocol does not tell the number of steps."""
    steps = [run.steps(task) for task in run.order]
    known = [n for n in steps if n is not None]
    return sum(run.record.cost.train_seconds) / sum(known) if known and len(known) == len(steps) else None


def cost_table(runs: Sequence[Run]) -> Table:
    """Means over a method's cells."""
    grid, rows = Grid.of(runs), []
    for method in grid.methods:
        mine = grid.of_method(method)
        costs, step = [run.record.cost for run in mine], mean_of(map(step_seconds, mine))
        rows.append(
            (
                method,
                grid.count(method),
                mean([sum(c.train_seconds) for c in costs]),
                None if step is None else 1000 * step,
                mean([c.evaluate_seconds for c in costs]),
                mean([c.peak_memory_bytes / 1e6 for c in costs]),
                max(c.trained_parameters for c in costs),
                max(c.stored_parameters for c in costs),
                mean([c.history_bytes / 1e3 for c in costs]),
            )
        )
    table = Table("cost", "Cost of a run", COLUMNS, tuple(rows), NOTE, grid.partial)
    known = any(row[3] is not None for row in rows)
    return (table if known else table.without("ms a step")).noting(grid.note)
