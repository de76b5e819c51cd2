"""General capability before and after a run, such as zero-shot MMLU: percent, means over cells."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.general_file import GENERAL_FILE, General
from anchorlora.reports.grid import Grid
from anchorlora.reports.orders import order_label, paper_order
from anchorlora.reports.published import printed_general
from anchorlora.reports.records import Run, deviation, mean
from anchorlora.reports.tables.beside import beside
from anchorlora.reports.tables.form import Cell, Column, Table

SAME = ("task", "metric", "limit", "n", "few_shot", "data_sha256")


def general_table(runs: Sequence[Run]) -> Table:
    """The base model, then each method: mean score, change, and sd over the seeds of one order.  Refuses mixed tasks."""
    mine = [run for run in runs if run.general is not None]
    _refuse_mixed(mine)
    grid, facts = Grid.of(mine), _facts(mine[0])
    columns = (Column("method"), Column("cells"), Column("score", better="higher"), Column("sd"), Column("change", signed=True))
    bases = [_facts(run).base.score for run in mine]
    rows: list[tuple[Cell, ...]] = [("base model", None, mean(bases), None, None)]
    for method in grid.methods:
        scores = [_facts(run).after.score for run in grid.of_method(method)]
        changes = [_facts(run).change for run in grid.of_method(method)]
        rows.append((method, grid.count(method), mean(scores), deviation(scores) if grid.one_order else None, mean(changes)))
    title = f"General capability: {facts.task} ({facts.metric}), after {', '.join(map(order_label, grid.orders))}"
    partial = frozenset({0, *(i + 1 for i in grid.partial)})
    table = Table("general", title, columns, tuple(rows), _note(facts, grid), partial)
    table = table.noting(grid.note)
    asked = (facts.task, facts.limit, facts.few_shot) == ("mmlu", None, 0)
    fits = asked and [paper_order(order) for order in grid.orders] == ["order1"]
    return beside(table, _printed(["base", *grid.methods]), mine) if fits else table


def _printed(names: Sequence[str]) -> dict[str, list[float | None]]:
    fields = {"score": "mean", "sd": "std", "change": "delta"}
    return {heading: [printed_general(name, field) for name in names] for heading, field in fields.items()}


def _note(facts: General, grid: Grid) -> str:
    size = f"{facts.n:,} questions" + (f" (the first {facts.limit} a subject)" if facts.limit else "")
    size += f", {facts.few_shot} solved examples before each"
    sd = "sd: sample standard deviation (ddof 1) over seeds, percentage points; " if grid.one_order else ""
    return f"Percent of {size}; {sd}change: after less base, percentage points. The base model is not ranked."


def _refuse_mixed(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        first, other = _facts(runs[0]), _facts(run)
        unlike = [name for name in SAME if getattr(first, name) != getattr(other, name)]
        if unlike:
            told = ", ".join(f"{name} {getattr(first, name)!r} and {getattr(other, name)!r}" for name in unlike)
            places = f"{runs[0].folder / GENERAL_FILE} and {run.folder / GENERAL_FILE}"
            raise ValueError(f"{places} cannot stand in one table: {told}; run `anchorlora general` with one task and limit")


def _facts(run: Run) -> General:
    assert run.general is not None
    return run.general
