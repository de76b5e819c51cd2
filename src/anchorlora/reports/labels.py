"""Names of task orders: the three of the paper, for its own tasks, and by position for the tasks of `mini`.

Short names for files and for layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anchorlora.reports.published import PUBLISHED

PAPER = {name: tuple(order) for name, order in PUBLISHED["orders"].items()}
TASKS = PAPER["order1"]
MINI = ("entities", "reviews", "questions", "news")  # tests hold it against the recipe


def paper_tasks(tasks: Sequence[str]) -> tuple[str, ...] | None:
    """The paper's tasks at these tasks' places; None for tasks that have no place there."""
    for own in (TASKS, MINI):
        if set(tasks) <= set(own):
            return tuple(TASKS[own.index(task)] for task in tasks)
    return None


def paper_order(order: Sequence[str]) -> str | None:
    """order1, order2 or order3, if it is one of them."""
    theirs = paper_tasks(order)
    return next((name for name, tasks in PAPER.items() if tasks == theirs), None)


def is_paper_trace(order: Sequence[str]) -> bool:
    """Whether two tasks are those of the paper's mechanism trace: the first two of order1."""
    return tuple(order) == TASKS[:2]


def order_label(order: Sequence[str]) -> str:
    """The order's name, or its tasks, shortened to their first letters when there are many."""
    return paper_order(order) or tasks_in(order)


def tasks_in(order: Sequence[str]) -> str:
    """The order as its tasks."""
    return ">".join(order if len(order) <= 4 else (task[:3] for task in order))


def file_name(text: str) -> str:
    """The text as a file's name, less its suffix."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:120]


def short_layers(modules: Sequence[str]) -> list[str]:
    """Layer paths less the parts that all of them share: model.layers.3.self_attn.q_proj -> 3.q_proj."""
    parts = [module.split(".") for module in modules]
    if len({len(path) for path in parts}) != 1 or len(parts) < 2:
        return list(modules)
    told = [i for i in range(len(parts[0])) if len({path[i] for path in parts}) > 1]
    return [".".join(path[i] for i in told) for path in parts]
