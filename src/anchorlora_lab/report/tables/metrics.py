"""Tables of every metric beside the primary one: each task after the last one, and perplexity = exp(loss)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from anchorlora.pages.labels import file_name
from anchorlora.pages.table import Better, Column, Table
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.records import Run, mean_of
from anchorlora_lab.report.tables.pivot import Measure, average, by_methods, means

LOSS, PERPLEXITY, TOKEN_ACCURACY = "loss", "perplexity", "token_accuracy"
UNITS = {
    LOSS: "Mean cross-entropy per token of the right answer, in nats.",
    PERPLEXITY: "exp(loss): 1 if every token of the right answer is certain.",
    TOKEN_ACCURACY: "Percent of the right text's tokens that the model would have chosen.",
}
Rows = list[list[float | None]]


def metric_tables(runs: Sequence[Run]) -> list[Table]:
    """One table per metric of the records, but for a metric that is every task's accuracy; then perplexity."""
    names = dict.fromkeys(name for run in runs for name in (run.record.metrics or {}))
    told = [name for name in names if not all(_is_accuracy(run, name) for run in runs)]
    return [metric_table(runs, name) for name in (*told, *([PERPLEXITY] if LOSS in names else []))]


def metric_table(runs: Sequence[Run], name: str) -> Table:
    """A metric of every task after the last one, and its change since the task was learned: means over runs."""
    grid = Grid.of(runs)
    lower = name in (LOSS, PERPLEXITY)
    better: Better = "lower" if lower else "higher"
    digits = 3 if lower else 2
    tasks = [task for task in grid.orders[0] if any(_last(run, name=name, task=task) is not None for run in runs)]
    measures: list[Measure[Run]] = means({task: partial(_last, name=name, task=task) for task in tasks}, digits)
    every: list[Measure[Run]] = [
        (Column("mean", digits, better=better), lambda runs: mean_of(of(runs) for _, of in measures)),  # type: ignore[misc]
        (Column("change", digits, signed=True), average(partial(_change, name=name))),
    ]
    unit = UNITS.get(name, "Percent.")
    note = f"{unit} After the last task, means over runs; change: since each earlier task was learned, mean over tasks."
    title = f"{name.replace('_', ' ').capitalize()} by task"
    return by_methods(file_name(f"metric-{name}"), title, grid, [*measures, *every], note)


def values(run: Run, name: str) -> Rows | None:
    """Return a metric's triangle; None for a run without it."""
    found = run.record.metrics or {}
    if name != PERPLEXITY:
        return found.get(name)
    return [[None if value is None else _exp(value) for value in row] for row in found[LOSS]] if LOSS in found else None


def _exp(value: float) -> float | None:
    """None where perplexity is beyond what a float holds."""
    return math.exp(value) if value < 700 else None


def _is_accuracy(run: Run, name: str) -> bool:
    return (run.record.metrics or {}).get(name, run.record.accuracy) == run.record.accuracy


def _last(run: Run, *, name: str, task: str) -> float | None:
    rows = values(run, name)
    return rows[-1][run.order.index(task)] if rows else None


def _change(run: Run, *, name: str) -> float | None:
    rows = values(run, name) or []
    pairs = [(rows[i][i], rows[-1][i]) for i in range(len(rows) - 1)]
    return mean_of(last - first for first, last in pairs if first is not None and last is not None)
