"""Names of task orders (the paper's three, also by position for the tasks of `mini`), and short names of files and layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anchorlora.recipes.protocol import TASKS, orders_of
from anchorlora.recipes.standard import TASKS as MINI

PAPER = orders_of(TASKS)


def paper_tasks(tasks: Sequence[str]) -> tuple[str, ...] | None:
    """Return the paper's tasks at the places of these tasks; None for tasks that have no place there."""
    for own in (TASKS, MINI):
        if set(tasks) <= set(own):
            return tuple(TASKS[own.index(task)] for task in tasks)
    return None


def paper_order(order: Sequence[str]) -> str | None:
    """Return "order1", "order2", or "order3"; None for any other order."""
    theirs = paper_tasks(order)
    return next((name for name, tasks in PAPER.items() if tasks == theirs), None)


def order_label(order: Sequence[str]) -> str:
    """Return an order's name, or else its tasks as `tasks_in` writes them."""
    return paper_order(order) or tasks_in(order)


def tasks_in(order: Sequence[str]) -> str:
    """Return an order as its tasks, joined by ">"; more than four are cut to three letters of each part of a name."""
    return ">".join(order if len(order) <= 4 else ("-".join(part[:3] for part in task.split("-")) for task in order))


def file_name(text: str) -> str:
    """Return a text as a file name of at most 120 characters: all but letters, digits, ".", "_", and "-" become hyphens."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:120]


def short_layers(modules: Sequence[str]) -> list[str]:
    """Return layer paths without the parts that all of them share."""
    parts = [module.split(".") for module in modules]
    if len({len(path) for path in parts}) != 1 or len(parts) < 2:
        return list(modules)
    told = [i for i in range(len(parts[0])) if len({path[i] for path in parts}) > 1]
    return [".".join(path[i] for i in told) for path in parts]
