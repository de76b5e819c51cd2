"""Tables of answers: general capability before and after training, accuracy of every task after every task, invalid predictions."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.errors import InvalidValue
from anchorlora.pages.labels import order_label, paper_order
from anchorlora.pages.table import Column, Table, Value
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.published import printed_capability
from anchorlora_lab.report.records import Run, deviation, mean, mean_of
from anchorlora_lab.report.tables.paper import beside
from anchorlora_lab.suites.evaluation import EVAL_FILE, Evaluation

SAME = ("task", "metric", "limit", "n", "shots", "apply_chat_template", "files")


def evaluation_table(runs: Sequence[Run]) -> Table:
    """General capability of the base model, then of each method: mean score, change, and sd over the seeds of one order.

    Args:
        runs: Runs of one study; those without an eval.json are left out.

    Raises:
        InvalidValue: If the runs were evaluated on different tasks or in different ways.
    """
    mine = [run for run in runs if run.evaluation is not None]
    _refuse_mixed(mine)
    grid, facts = Grid.of(mine), _facts(mine[0])
    columns = (Column("method"), Column("runs"), Column("score", better="higher"), Column("sd"), Column("change", signed=True))
    bases = [_facts(run).base.score for run in mine]
    rows: list[tuple[Value, ...]] = [("base model", None, mean(bases), None, None)]
    for method in grid.methods:
        scores = [_facts(run).after.score for run in grid.of_method(method)]
        changes = [_facts(run).change for run in grid.of_method(method)]
        rows.append((method, grid.count(method), mean(scores), deviation(scores) if grid.one_order else None, mean(changes)))
    title = f"General capability: {facts.task} ({facts.metric}), after {', '.join(map(order_label, grid.orders))}"
    partial = frozenset({0, *(i + 1 for i in grid.partial)})
    table = Table("capability", title, columns, tuple(rows), _note(facts, grid), partial)
    table = table.noting(grid.note)
    asked = (facts.task, facts.limit, facts.shots, facts.apply_chat_template) == ("mmlu", None, "0", False)
    fits = asked and [paper_order(order) for order in grid.orders] == ["order1"]
    return beside(table, _printed(["base", *grid.methods]), mine) if fits else table


def _printed(names: Sequence[str]) -> dict[str, list[float | None]]:
    fields = {"score": "mean", "sd": "std", "change": "delta"}
    return {heading: [printed_capability(name, field) for name in names] for heading, field in fields.items()}


def _note(facts: Evaluation, grid: Grid) -> str:
    size = f"{facts.n:,} questions" + (f" (the first {facts.limit} of each subject)" if facts.limit else "")
    size += f", {facts.shots}-shot" + (", through the chat template" if facts.apply_chat_template else "")
    sd = "sd: sample standard deviation (ddof 1) over seeds, percentage points; " if grid.one_order else ""
    return f"Percent of {size}; {sd}change: score minus base model, percentage points. The base model is not ranked."


def _refuse_mixed(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        first, other = _facts(runs[0]), _facts(run)
        unlike = [name for name in SAME if getattr(first, name) != getattr(other, name)]
        if unlike:
            told = ", ".join(f"{name} {getattr(first, name)!r} and {getattr(other, name)!r}" for name in unlike)
            places = f"{runs[0].folder / EVAL_FILE} and {run.folder / EVAL_FILE}"
            raise InvalidValue(f"{places} cannot share a table: {told}; run `anchorlora eval` with one task and limit")


def _facts(run: Run) -> Evaluation:
    assert run.evaluation is not None
    return run.evaluation


INVALID = "Percent of predictions that are not a label of their task; they count as wrong."


def invalid_table(runs: Sequence[Run]) -> Table:
    """Rates of invalid predictions after the last task, by method and task: means over runs.

    Args:
        runs: Runs of one study.
    """
    grid, tasks = Grid.of(runs), _tasks(runs)
    columns = (Column("method"), Column("runs"), *(Column(task) for task in tasks), Column("all tasks"), Column("worst"))
    rows: list[tuple[Value, ...]] = []
    for method in grid.methods:
        mine = grid.of_method(method)
        each = [mean_of(final_invalid(run, task) for run in mine) for task in tasks]
        worst = max((rate for run in mine if (rate := worst_invalid(run)) is not None), default=None)
        rows.append((method, grid.count(method), *each, mean_of(each), worst))
    note = f"{INVALID} After the last task, means over runs; worst: the highest rate of any task at any stage of any run."
    return Table("invalid", "Invalid predictions by method", columns, tuple(rows), note, grid.partial).noting(grid.note)


def invalid_by_seed(runs: Sequence[Run]) -> Table:
    """Rates of invalid predictions after the last task, one row per run.

    Args:
        runs: Runs of one study.
    """
    grid, tasks = Grid.of(runs), _tasks(runs)
    listed = [run for method in grid.methods for run in grid.of_method(method)]
    columns = (Column("method"), Column("order"), Column("seed"), *(Column(task) for task in tasks), Column("worst"))
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (run.method, order_label(run.order), run.seed, *(final_invalid(run, task) for task in tasks), worst_invalid(run))
        for run in listed
    )
    note = f"{INVALID} After the last task; worst: the highest rate of any task at any stage."
    return Table("invalid-by-seed", "Invalid predictions of every run", columns, rows, note)


def final_invalid(run: Run, task: str) -> float | None:
    """Return the percent of invalid predictions on a task, after the last task; None for a task without labels."""
    return run.record.invalid[-1][run.order.index(task)]


def worst_invalid(run: Run) -> float | None:
    """Return the highest percent of invalid predictions on any task at any stage; None if no task has labels."""
    return max((value for row in run.record.invalid for value in row if value is not None), default=None)


def _tasks(runs: Sequence[Run]) -> tuple[str, ...]:
    """The tasks in the order of the first."""
    return Grid.of(runs).orders[0]
