"""Tables of answers: general capability before and after training, accuracy of every task after every task, invalid predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from anchorlora.errors import InvalidValue
from anchorlora.pages.record import order_label, paper_order
from anchorlora.pages.table import Better, Column, Table
from anchorlora.text import amount, file_name
from anchorlora_lab.report.grid import METHOD, ORDER, SEED, Grid, Measure, average, by_methods, means, pivot, spread
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.published import beside, printed
from anchorlora_lab.report.records import Run, mean, mean_of
from anchorlora_lab.suites.evaluation import EVAL_FILE, Evaluation

SAME = ("task", "metric", "limit", "n", "shots", "apply_chat_template", "files")


def evaluation_table(runs: Sequence[Run]) -> Table | None:
    """General capability of the base model, then of each method: mean score, change, and sd over the seeds of one order."""
    evaluated = [run for run in runs if run.evaluation is not None]
    if not evaluated:
        return None
    _refuse_mixed(evaluated)
    grid, facts = Grid.of(evaluated), _facts(evaluated[0])
    scores: Measure = (Column("score", better="higher"), lambda runs: mean([_facts(run).after.score for run in runs]))
    sd: Measure = (Column("sd"), spread(lambda run: _facts(run).after.score if grid.one_order else None))
    change: Measure = (Column("change", signed=True), lambda runs: mean([_facts(run).change for run in runs]))
    title = f"General capability: {facts.task} ({facts.metric}), after {', '.join(map(order_label, grid.orders))}"
    base = ("base model", None, mean([_facts(run).base.score for run in evaluated]), None, None)
    table = by_methods("capability", title, grid, [scores, sd, change], _note(facts, grid))
    table = replace(table, rows=(base, *table.rows), partial=frozenset({0, *(i + 1 for i in grid.partial)}))
    asked = (facts.task, facts.limit, facts.shots, facts.apply_chat_template) == ("mmlu", None, "0", False)
    fits = asked and [paper_order(order) for order in grid.orders] == ["order1"]
    fields, of = {"score": "mean", "sd": "std", "change": "delta"}, ("base", *grid.methods)
    paper = {heading: [printed("mmlu_qwen3_8b_after_order1", name, field) for name in of] for heading, field in fields.items()}
    return beside(table, paper, evaluated) if fits else table


def _note(facts: Evaluation, grid: Grid) -> str:
    size = amount(facts.n, "question") + (f" (the first {facts.limit} of each subject)" if facts.limit else "")
    size += f", {facts.shots}-shot" + (", through the chat template" if facts.apply_chat_template else "")
    sd = "sd: sample standard deviation (ddof 1) over seeds, percentage points; " if grid.one_order else ""
    return f"Percent of {size}; {sd}change: score minus base model, percentage points. The base model is not ranked."


def _refuse_mixed(runs: Sequence[Run]) -> None:
    for run in runs[1:]:
        first, other = _facts(runs[0]), _facts(run)
        unlike = [name for name in SAME if getattr(first, name) != getattr(other, name)]
        if unlike:
            differences = ", ".join(f"{name} {getattr(first, name)!r} and {getattr(other, name)!r}" for name in unlike)
            places = f"{runs[0].folder / EVAL_FILE} and {run.folder / EVAL_FILE}"
            raise InvalidValue(f"{places} cannot share a table: {differences}; run `anchorlora eval` with one task and limit")


def _facts(run: Run) -> Evaluation:
    assert run.evaluation is not None
    return run.evaluation


def invalid_table(runs: Sequence[Run]) -> Table:
    """Rates of invalid predictions after the last task, by method and task: means over runs."""
    rates = _invalid_rates(runs)
    mean_rate: Measure = (Column("all tasks"), lambda group: mean_of(of(group) for _, of in rates))  # type: ignore[misc]
    every = [*rates, mean_rate, (Column("worst"), worst_invalid)]
    return by_methods("invalid", "Invalid predictions by method", Grid.of(runs), every)


def invalid_by_seed(runs: Sequence[Run]) -> Table:
    """Rates of invalid predictions after the last task, one row per run."""
    groups = [[run] for group in Grid.of(runs).groups for run in group]
    every = [METHOD, ORDER, SEED, *_invalid_rates(runs), (Column("worst"), worst_invalid)]
    return pivot("invalid-by-seed", "Invalid predictions of every run", groups, every)


def _invalid_rates(runs: Sequence[Run]) -> list[Measure]:
    """A column for each task, in the order of the first."""
    return means({task: partial(final_invalid, task=task) for task in Grid.of(runs).orders[0]})


def final_invalid(run: Run, task: str) -> float | None:
    """Return the percent of invalid predictions on a task, after the last task; None for a task without labels."""
    return run.record.invalid[-1][run.order.index(task)]


def worst_invalid(runs: Sequence[Run]) -> float | None:
    """Return the highest percent of invalid predictions on any task at any stage of any run; None if no task has labels."""
    return max((rate for run in runs for row in run.record.invalid for rate in row if rate is not None), default=None)


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
    records = [run.record for run in runs]
    reported = [name for name in names if any((r.metrics or {}).get(name, r.accuracy) != r.accuracy for r in records)]
    return [metric_table(runs, name) for name in (*reported, *([PERPLEXITY] if LOSS in names else []))]


def metric_table(runs: Sequence[Run], name: str) -> Table:
    """A metric of every task after the last one, and its change since the task was learned: means over runs."""
    grid = Grid.of(runs)
    better: Better = "lower" if name in (LOSS, PERPLEXITY) else "higher"
    digits = 3 if better == "lower" else 2
    tasks = [task for task in grid.orders[0] if any(_last(run, name=name, task=task) is not None for run in runs)]
    measures: list[Measure] = means({task: partial(_last, name=name, task=task) for task in tasks}, digits)
    every: list[Measure] = [
        (Column("mean", digits, better=better), lambda runs: mean_of(of(runs) for _, of in measures)),  # type: ignore[misc]
        (Column("change", digits, signed=True), average(partial(_change, name=name))),
    ]
    title = f"{name.replace('_', ' ').capitalize()} by task"
    note = NOTES["metric"].format(unit=UNITS.get(name, "Percent."))
    return by_methods(file_name(f"metric-{name}"), title, grid, [*measures, *every], note)


def values(run: Run, name: str) -> Rows | None:
    """Return a metric's triangle; None for a run without it."""
    metrics = run.record.metrics or {}
    if name != PERPLEXITY:
        return metrics.get(name)
    if LOSS not in metrics:
        return None  # and none where perplexity is beyond what a float holds
    return [[None if value is None or value >= 700 else math.exp(value) for value in row] for row in metrics[LOSS]]


def _last(run: Run, *, name: str, task: str) -> float | None:
    rows = values(run, name)
    return rows[-1][run.order.index(task)] if rows else None


def _change(run: Run, *, name: str) -> float | None:
    rows = values(run, name) or []
    pairs = [(rows[i][i], rows[-1][i]) for i in range(len(rows) - 1)]
    return mean_of(last - first for first, last in pairs if first is not None and last is not None)
