"""Tables of what was run: task orders, settings beside the paper's, and each method's definition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from anchorlora.pages.record import PAPER, order_label, paper_order, paper_tasks
from anchorlora.pages.table import Column, Table
from anchorlora_lab.report.comparability import NOTED, OWNED, leaves, within
from anchorlora_lab.report.grid import METHOD, Grid, Measure, pivot
from anchorlora_lab.report.published import PARAMETERS, PUBLISHED, has_base_model, has_official_files
from anchorlora_lab.report.records import Run, by_method


def orders_table(runs: Sequence[Run]) -> Table:
    """The tasks of each order, in training order."""
    orders = Grid.of(runs).orders
    columns = (Column("order"), *(Column(f"task {i + 1}") for i in range(max(map(len, orders)))))
    rows = tuple((order_label(order) if paper_order(order) else f"custom {i}", *order) for i, order in enumerate(orders, 1))
    moved = [order for order in orders if paper_order(order) and paper_tasks(order) != order]
    paper = "; ".join(f"{paper_order(order)}: {', '.join(PAPER[paper_order(order) or ''])}" for order in moved)
    note = f"Named by position after the paper's orders ({paper})." if moved else ""
    return Table("orders", "Task orders", columns, rows, note)


def settings_table(runs: Sequence[Run]) -> Table:
    """Every setting that the runs share; beside the paper's value if the model and data are the paper's."""
    free = (*OWNED, *(field for field in NOTED if field.startswith("protocol.")))
    protocol = leaves(runs[0].record, fields=("protocol",))
    shared = {path: value for path, value in protocol.items() if not within(path, free)}
    names = {path.removeprefix("protocol."): value for path, value in sorted(shared.items())}
    fits = has_official_files(runs[0]) and any(has_base_model(runs[0], model) for model in PARAMETERS)
    rows = tuple((name, _as_text(value), printed_setting(name, runs[0].order) if fits else None) for name, value in names.items())
    table = Table("settings", "Settings", (Column("setting"), Column("ours"), Column("paper", printed=True)), rows)
    return table.noting_printed("paper: the published value.") if fits else table.without("paper")


def methods_table(runs: Sequence[Run]) -> Table:
    """The definition of each method, and the strength selected for it, if any."""
    measures: list[Measure] = [
        METHOD,
        (Column("runs"), len),
        (Column("definition"), lambda group: group[0].record.method.definition),
        (Column("tuned"), lambda group: _as_text(tuned) if (tuned := group[0].setting("tuned")) else None),
    ]
    table = pivot("methods", "Methods", by_method(runs).values(), measures, "")
    return table if any(row[-1] is not None for row in table.rows) else table.without("tuned")


def printed_setting(name: str, tasks: Sequence[str]) -> str | None:
    """Return the paper's value of a setting as text, or None; examples of a task are matched by the task's place."""
    protocol = PUBLISHED["protocol"]
    value: Any = protocol["settings"].get(name)
    if name.startswith("examples.") and name.endswith(".train"):
        task = name.removeprefix("examples.").removesuffix(".train")
        known = paper_tasks([task]) if task in tasks else None
        value = protocol["train_examples"][known[0]] if known else None
    elif name.startswith("examples.") and name.endswith(".test"):
        value = protocol["test_examples_per_task"] if paper_tasks(tasks) else None
    return None if value is None else _as_text(value)


def _as_text(value: Any) -> str:
    """A setting as text: whole numbers without a point, lists with commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_as_text, value))
    if isinstance(value, float):
        return format(value, "g")
    return value if isinstance(value, str) else json.dumps(value)
