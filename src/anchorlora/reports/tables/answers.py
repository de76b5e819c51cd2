"""Accuracy of every task after every task, and answers that are no label."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.reports.grid import Grid
from anchorlora.reports.names import file_name
from anchorlora.reports.orders import order_label, tasks_in
from anchorlora.reports.records import Run, mean
from anchorlora.reports.tables.form import Cell, Column, Table

ILLEGAL = "Percent of answers that are no label of their task; they count as wrong."


def triangle_table(run: Run) -> Table:
    """The accuracy of every task after every task."""
    columns = (Column("after"), *(Column(task, 1) for task in run.order))
    size = len(run.order)
    rows = tuple((run.order[t], *row, *[None] * (size - len(row))) for t, row in enumerate(run.record.accuracy))
    title = f"Accuracy in percent: {run.method}, {tasks_in(run.order)}, seed {run.seed}"
    return Table(file_name(f"accuracy-{run.method}-{order_label(run.order)}-{run.seed}"), title, columns, rows)


def illegal_table(runs: Sequence[Run]) -> Table:
    """Each method's rates after the last task: means over its cells, by task."""
    grid, tasks = Grid.of(runs), _tasks(runs)
    columns = (Column("method"), Column("cells"), *(Column(task) for task in tasks), Column("all tasks"), Column("worst"))
    rows: list[tuple[Cell, ...]] = []
    for method in grid.methods:
        mine = grid.of_method(method)
        each = [mean([final_illegal(run, task) for run in mine]) for task in tasks]
        rows.append((method, grid.count(method), *each, mean(each), max(worst_illegal(run) for run in mine)))
    note = f"{ILLEGAL} After the last task, means over cells; worst: the highest rate of any task at any stage of any cell."
    return Table("illegal", "Illegal answers by method", columns, tuple(rows), note, grid.partial).noting(grid.note)


def illegal_by_seed(runs: Sequence[Run]) -> Table:
    """The same for every cell."""
    grid, tasks = Grid.of(runs), _tasks(runs)
    cells = [run for method in grid.methods for run in grid.of_method(method)]
    columns = (Column("method"), Column("order"), Column("seed"), *(Column(task) for task in tasks), Column("worst"))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (run.method, order_label(run.order), run.seed, *(final_illegal(run, task) for task in tasks), worst_illegal(run))
        for run in cells
    )
    note = f"{ILLEGAL} After the last task; worst: the highest rate of any task at any stage."
    return Table("illegal-by-seed", "Illegal answers of every cell", columns, rows, note)


def final_illegal(run: Run, task: str) -> float:
    """Percent of illegal answers to a task after the last one."""
    return run.record.illegal[-1][run.order.index(task)]


def worst_illegal(run: Run) -> float:
    return max(max(row) for row in run.record.illegal)


def _tasks(runs: Sequence[Run]) -> tuple[str, ...]:
    """The tasks in the order of the first."""
    return Grid.of(runs).orders[0]
