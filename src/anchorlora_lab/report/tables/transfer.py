"""Tables of what earlier training gave to a task, and of single answers that it cost earlier tasks.

    FWT      mean_i (a[i][i] - alone[i]), percentage points; alone: accuracy of a run on the task alone   (SAPT, arXiv 2401.08295)
    F        share of answers that were right when their task was learned, and are wrong at the end
    F_true   max(F - (1 - a)(1 - b) / (k - 1), 0) for accuracies a then and b at the end, and k labels    (arXiv 2510.17776)

The adjustment takes away what guessing among k labels explains. Without labels nothing can be guessed, and F stands as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anchorlora.pages.table import Column, Table
from anchorlora_lab.report.comparability import alike
from anchorlora_lab.report.grid import METHOD, Grid, Measure, average, pivot
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.records import Run, mean_of
from anchorlora_lab.report.tables.references import PLAIN


def forward_table(runs: Sequence[Run], alone: Sequence[Run]) -> Table | None:
    """FWT of each method: mean over the runs whose every task was also learned alone, with the same seed and settings."""
    grid = Grid.of(runs)
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
    grid = Grid.of(runs)
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
