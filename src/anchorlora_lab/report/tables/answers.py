"""Tables of answers: general capability before and after training, accuracy of every task after every task, invalid predictions,
what earlier training gave to a task, and single answers that it cost earlier tasks.

    FWT      mean_i (a[i][i] - alone[i]), percentage points; alone: accuracy of a run on the task alone   (SAPT, arXiv 2401.08295)
    F        share of answers that were right when their task was learned, and are wrong at the end
    F_true   max(F - (1 - a)(1 - b) / (k - 1), 0) for accuracies a then and b at the end, and k labels    (arXiv 2510.17776)

The adjustment takes away what guessing among k labels explains. Without labels nothing can be guessed, and F stands as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from anchorlora.errors import InvalidValue
from anchorlora.pages.record import order_label, paper_order
from anchorlora.pages.table import Better, Column, Table
from anchorlora.text import amount, file_name
from anchorlora_lab.report.comparability import alike
from anchorlora_lab.report.grid import METHOD, ORDER, SEED, Grid, Measure, average, by_methods, means, pivot, spread
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.published import beside, printed
from anchorlora_lab.report.records import Run, mean, mean_of
from anchorlora_lab.report.tables.references import PLAIN
from anchorlora_lab.suites.evaluation import EVAL_FILE, Evaluation

SAME = ("task", "metric", "limit", "n", "shots", "apply_chat_template", "files")


def evaluation_table(runs: Sequence[Run]) -> Table | None:
    """General capability of the base model, then of each method: mean score, change, and sd over the seeds of one order."""
    evaluated = [run for run in runs if run.evaluation is not None]
    if not evaluated:
        return None
    _refuse_mixed(evaluated)
    grid, facts = Grid(evaluated), _facts(evaluated[0])
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
    return by_methods("invalid", "Invalid predictions by method", Grid(runs), every)


def invalid_by_seed(runs: Sequence[Run]) -> Table:
    """Rates of invalid predictions after the last task, one row per run."""
    groups = [[run] for group in Grid(runs).groups for run in group]
    every = [METHOD, ORDER, SEED, *_invalid_rates(runs), (Column("worst"), worst_invalid)]
    return pivot("invalid-by-seed", "Invalid predictions of every run", groups, every)


def _invalid_rates(runs: Sequence[Run]) -> list[Measure]:
    """A column for each task, in the order of the first."""
    first = Grid(runs).orders[0]
    return means({task: lambda run, task=task: run.record.invalid[-1][run.order.index(task)] for task in first})  # type: ignore[misc]


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
    grid = Grid(runs)
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


def forward_table(runs: Sequence[Run], alone: Sequence[Run]) -> Table | None:
    """FWT of each method: mean over the runs whose every task was also learned alone, with the same seed and settings."""
    grid = Grid(runs)
    transfer: dict[int, float | None] = {}
    for group in grid.groups:  # by the method's own single-task runs or by the plain ones, whichever are of more of its runs
        own, plain = ({id(run): forward_transfer(run, alone, of=method) for run in group} for method in (group[0].method, PLAIN))
        transfer |= own if [*own.values()].count(None) <= [*plain.values()].count(None) else plain
    if all(value is None for value in transfer.values()):
        return None
    known = {method: sum(transfer[id(run)] is not None for run in grid.of_method(method)) for method in grid.methods}
    measures: list[Measure] = [
        METHOD,
        (Column("runs"), lambda group: f"{known[group[0].method]} of {grid.size}"),
        (Column("FWT", better="higher", signed=True), average(lambda run: transfer[id(run)])),
    ]
    partial = grid.partial | {i for i, method in enumerate(grid.methods) if known[method] < grid.size}
    note = NOTES["forward-transfer"].format(plain=PLAIN)
    return pivot("forward-transfer", "Forward transfer", grid.groups, measures, note, partial)


def forward_transfer(run: Run, alone: Sequence[Run], *, of: str) -> float | None:
    """Return FWT of a run, percentage points; None unless each of its tasks was learned alone by a method."""
    fitting = [single for single in alone if single.seed == run.seed and single.order[0] in run.order and alike(run, single)]
    singles = {single.order[0]: single.record.accuracy[0][0] for single in fitting if single.method == of}
    return run.record.triangle.forward_transfer([singles[task] for task in run.order]) if len(singles) == len(run.order) else None


@dataclass(frozen=True)
class Flips:
    """How the answers to one task's examples changed between the end of its training and the end of the run."""

    examples: int
    lost: int  # right then, wrong at the end
    gained: int  # wrong then, right at the end
    before: int
    labels: int | None  # number of labels; None for a task without

    def adjusted(self, flips: int) -> float | None:
        """Return flips as a percentage less what guessing explains; None for a task with fewer than two labels."""
        share = flips / self.examples
        if self.labels is None:
            return 100 * share
        if self.labels < 2:
            return None
        then = self.before / self.examples
        end = (self.before - self.lost + self.gained) / self.examples
        return 100 * max(share - (1 - then) * (1 - end) / (self.labels - 1), 0.0)


def flips_of(run: Run) -> list[Flips]:
    """Return the flips of every earlier task that is answered right or wrong; none where the predictions are not there."""
    graded, out = run.graded, list[Flips]()
    if graded is None:
        return out
    for number, task in enumerate(run.order[:-1]):
        pairs = [(was, graded.last[at]) for at, was in graded.learned.items() if at[0] == task and at in graded.last]
        if pairs and not any(None in pair for pair in pairs):
            labels = graded.labels[task] if run.record.invalid[number][number] is not None else None
            before = sum(bool(was) for was, _ in pairs)
            out.append(Flips(len(pairs), pairs.count((True, False)), pairs.count((False, True)), before, labels))
    return out


def flips_table(runs: Sequence[Run]) -> Table | None:
    """Answers to earlier tasks that flipped, and forgetting less what guessing explains, by method."""
    grid = Grid(runs)
    flips = {id(run): flips_of(run) for run in runs}
    if not any(flips.values()):
        return None
    measures: list[Measure] = [
        METHOD,
        (Column("runs"), lambda group: f"{sum(bool(flips[id(run)]) for run in group)} of {grid.size}"),
        (Column("answers", 0), average(lambda run: _total(f.examples for f in flips[id(run)]))),
        (Column("right to wrong", 1), average(lambda run: _total(f.lost for f in flips[id(run)]))),
        (Column("wrong to right", 1), average(lambda run: _total(f.gained for f in flips[id(run)]))),
        (Column("forgetting", better="lower"), average(lambda run: mean_of(f.adjusted(f.lost) for f in flips[id(run)]))),
        (Column("transfer", better="higher"), average(lambda run: mean_of(f.adjusted(f.gained) for f in flips[id(run)]))),
    ]
    partial = grid.partial | {i for i, group in enumerate(grid.groups) if sum(bool(flips[id(run)]) for run in group) < grid.size}
    return pivot("flips", "Answers that flipped", grid.groups, measures, partial=partial)


def _total(counts: Iterable[int]) -> float | None:
    """The sum; None of nothing."""
    known = list(counts)
    return float(sum(known)) if known else None
