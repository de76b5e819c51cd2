"""Tables of a run's record, and short names of its order and layers.  `mini` has the orders of the paper by position, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anchorlora.pages.table import Column, Table, Value
from anchorlora.recipes.protocol import TASKS, orders_of
from anchorlora.recipes.standard import TASKS as MINI
from anchorlora.store.record import DriftFacts, Record
from anchorlora.text import file_name

PAPER = orders_of(TASKS)

NOTE = (
    "rho: share of a task's change on the core used during it; tolerance: the largest rho that float32 rounding explains; "
    "protected: rho is within the tolerance; chance: rho of an unaligned change; rho first, rho union: the same share on the first "
    "task's core and on the union of all past cores; held-out: relative change of past feature rows that no core was built from; "
    "D_eff, D_old: norms of the change and of its part on the core."
)
CELLS: tuple[tuple[Column, Callable[[Record, DriftFacts], Value]], ...] = (
    (Column("method"), lambda record, drift: record.method.name),
    (Column("order"), lambda record, drift: order_label(record.order)),
    (Column("seed"), lambda record, drift: record.seed),
    (Column("after"), lambda record, drift: record.order[drift.task - 1]),
    (Column("rho", "e"), lambda record, drift: drift.rho),
    (Column("tolerance", "e"), lambda record, drift: drift.bound),
    (Column("protected"), lambda record, drift: "yes" if drift.exact else "no"),
    (Column("chance", "g"), lambda record, drift: drift.chance),
    (Column("rho first", "e"), lambda record, drift: drift.rho_first),
    (Column("rho union", "e"), lambda record, drift: drift.rho_union),
    (Column("held-out", "g"), lambda record, drift: drift.held_out.total if drift.held_out else None),
    (Column("D_eff", "g"), lambda record, drift: drift.d_eff),
    (Column("D_old", "e"), lambda record, drift: drift.d_old),
)


def triangle_table(record: Record) -> Table:
    """The accuracy of every task after every task, in percent."""
    columns = (Column("after"), *(Column(task, 1) for task in record.order))
    method, size = record.method.name, len(record.order)
    rows = tuple((record.order[t], *row, *[None] * (size - len(row))) for t, row in enumerate(record.accuracy))
    title = f"Accuracy (%): {method}, {tasks_in(record.order)}, seed {record.seed}"
    return Table(file_name(f"accuracy-{method}-{order_label(record.order)}-{record.seed}"), title, columns, rows)


def drift_table(records: Sequence[Record]) -> Table:
    """Drift of every run and task, one row each."""
    rows = tuple(tuple(cell(record, drift) for _, cell in CELLS) for record in records for drift in record.drift)
    table = Table("drift", "Drift on protected directions", tuple(column for column, _ in CELLS), rows, NOTE)
    return table if len({tuple(record.order) for record in records}) > 1 else table.without("order")


def order_label(order: Sequence[str]) -> str:
    """Return an order's name, or else its tasks as `tasks_in` writes them."""
    return paper_order(order) or tasks_in(order)


def tasks_in(order: Sequence[str]) -> str:
    """Return an order as its tasks, joined by ">"; more than four are cut to the first letters, three if these tell them apart."""
    names, letters = list(order), 3
    while len(order) > 4 and (letters == 3 or len({*names}) < len({*order})):
        names = ["-".join(part[:letters] for part in task.split("-")) for task in order]
        letters += 1
    return ">".join(names)


def paper_tasks(tasks: Sequence[str]) -> tuple[str, ...] | None:
    """Return the paper's tasks at the places of these tasks; None for tasks that have no place there."""
    for own in (TASKS, MINI):
        if set(tasks) <= set(own):
            return tuple(TASKS[own.index(task)] for task in tasks)
    return None


def paper_order(order: Sequence[str]) -> str | None:
    """Return "order1", "order2", or "order3"; None for any other order."""
    paper_names = paper_tasks(order)
    return next((name for name, tasks in PAPER.items() if tasks == paper_names), None)


def short_layers(modules: Sequence[str]) -> list[str]:
    """Return layer paths without the parts that all of them share."""
    parts = [module.split(".") for module in modules]
    if len({len(path) for path in parts}) != 1 or len(parts) < 2:
        return list(modules)
    positions = [i for i in range(len(parts[0])) if len({path[i] for path in parts}) > 1]
    return [".".join(path[i] for i in positions) for path in parts]
