"""References that give scores a meaning: guessing, the majority label, the base model as it is, and each task trained alone.

    chance           1 / k of the test examples whose right answer is one of the task's k labels
    majority label   test examples with the label that is most frequent among the training examples that the run used
    zero-shot        accuracy of the base model: a run at learning rate 0
    single-task      accuracy of seq-lora right after training on the task alone: runs of one task, and first tasks of sequences

A score shows learning if it is above   m + 2 sqrt(sum_i m_i (1 - m_i) / n_i) / N,   m_i the majority label's share of the n_i test
examples of task i, m their mean over N tasks: two binomial standard errors of one test of every task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anchorlora.methods import METHODS
from anchorlora.pages.table import Table, Value
from anchorlora.store.record import LabelCount
from anchorlora_lab.report.comparability import alike
from anchorlora_lab.report.layout import NOTES, WORDS, value_of
from anchorlora_lab.report.records import FAMILIES, Run, by_method, group_by, mean, mean_of

PLAIN = METHODS.baseline("shared").name  # whose single-task runs serve methods that have none of their own
LEVELS = ("chance", "majority label", "zero-shot", "single-task")
SCORES_OF = {"AA": "AA", "LA": "LA", "BWT": "LA", "FM": "LA"}  # forgetting means something where something was learned


def guessed(labels: Mapping[str, LabelCount], tested: int) -> float:
    """Return the accuracy of guessing every label equally often, percent."""
    return 100 * sum(count.test for count in labels.values()) / (len(labels) * tested)


def constant(labels: Mapping[str, LabelCount], tested: int) -> float:
    """Return the accuracy of always answering the label that is most frequent in training, percent; of equals, the first."""
    return 100 * max(labels.values(), key=lambda count: count.train).test / tested


@dataclass(frozen=True)
class References:
    """Levels that need no continual learning, percent by task; a level is empty unless it is known for every task."""

    tested: Mapping[str, int]  # task -> number of test examples
    by_task: Mapping[str, Mapping[str, float]]  # each of LEVELS; those of tasks trained alone are means over runs
    runs_alone: Mapping[str, int]  # task -> number of runs behind that mean

    @classmethod
    def of(cls, runs: Sequence[Run], others: Sequence[Run] = ()) -> References:
        """Return what is known for the tasks of a study."""
        tasks, first = runs[0].order, runs[0]
        counted: Mapping[str, Any] = next((run.labels for run in runs if set(tasks) <= set(run.labels)), {})
        known = first.tested if counted and set(tasks) <= set(first.tested) else {}
        chance = {task: guessed(counted[task], known[task]) for task in tasks if known}
        majority = {task: constant(counted[task], known[task]) for task in tasks if known}
        untrained = [run for run in (*runs, *others) if not run.trained and same_tests(run, first)]
        zero_shot = {task: run.record.accuracy[-1][i] for run in reversed(untrained) for i, task in enumerate(run.order)}
        plain = [run for run in (*runs, *others) if run.method == PLAIN and run.trained and len(tasks) > 1]
        fitting = [run for run in plain if run.order[0] in tasks and alike(first, run)]
        alone = group_by(fitting, lambda run: run.order[0])
        means = {task: mean([run.record.accuracy[0][0] for run in group]) for task, group in alone.items()}
        base, own = ({task: level[task] for task in tasks} if set(tasks) <= set(level) else {} for level in (zero_shot, means))
        levels = dict(zip(LEVELS, (chance, majority, base, own), strict=True))
        return cls(known, levels, {task: len(group) for task, group in alone.items()})

    @property
    def majority(self) -> Mapping[str, float]:
        """The accuracy of always answering the most frequent label, by task; empty if it is not known."""
        return self.by_task["majority label"]

    @property
    def line(self) -> float | None:
        """The value that a mean over all tasks must exceed to show learning, percent; None if the majority label is not known."""
        if not self.majority:
            return None
        spread = math.sqrt(math.fsum(p * (100 - p) / self.tested[task] for task, p in self.majority.items()))
        return mean(list(self.majority.values())) + 2 * spread / len(self.majority)

    def levels(self) -> dict[str, float]:
        """Return the mean over the tasks of each level that is known, percent."""
        return {name: mean(list(level.values())) for name, level in self.by_task.items() if level}

    def unlearned(self, runs: Sequence[Run]) -> frozenset[str]:
        """Return the scores whose means over some runs show no learning."""
        line = self.line
        means = {name: mean_of(value_of(run, name) for run in runs) for name in ("AA", "LA")}
        known = ((name, means[by]) for name, by in SCORES_OF.items())
        return frozenset(name for name, value in known if line is not None and value is not None and value < line)

    def mark(self, table: Table, unlearned: Iterable[frozenset[str]], headings: Mapping[str, str] | None = None) -> Table:
        """Return the table with the cells marked that show no learning, and a sentence that says so."""
        named = headings or {name: name for name in SCORES_OF}
        there = {column.heading for column in table.columns}
        shown = {name: heading for name, heading in named.items() if heading in there}
        cells = frozenset((i, shown[name]) for i, names in enumerate(unlearned) for name in names if name in shown)
        if not cells or self.line is None:
            return table
        sentence = "" if table.unlearned else NOTES["unlearned"].format(line=self.line)
        return replace(table, unlearned=table.unlearned | cells).noting(sentence)

    def below(self, table: Table) -> Table:
        """Return the table with a row for each level that is known, in the columns AA and LA and those of orders and tasks."""
        levels = self.levels()
        if not levels:
            return table
        ranked = [column.heading if column.better == "higher" and column.heading != "BWT" else None for column in table.columns[1:]]
        rows: list[tuple[Value, ...]] = [
            (name, *(None if heading is None else self.by_task[name].get(heading, level) for heading in ranked))
            for name, level in levels.items()
        ]
        return table.under(rows).noting(self._explain_levels(levels))

    def _explain_levels(self, levels: Mapping[str, float]) -> str:
        least, most = (pick(self.runs_alone.values(), default=0) for pick in (min, max))
        runs = f"{least}" if least == most else f"{least} to {most}"
        levels_text = "; ".join(f"{name}: {WORDS['levels'][name].format(plain=PLAIN, runs=runs)}" for name in levels)
        return f"{levels_text.capitalize()}. These rows are not ranked."


def same_tests(run: Run, other: Run) -> bool:
    """Tell whether two runs have one base model and were tested on the same examples of the same tasks; training may differ."""
    alike = set(run.order) == set(other.order) and run.record.base_model == other.record.base_model
    return alike and _tests(run) == _tests(other)


def _tests(run: Run) -> dict[str, Any]:
    settings = {name: run.setting(name) for name in ("evaluation", "metric", "own_wording")}
    files = {path: file.sha256 for path, file in run.record.data.items() if path.split("/")[-1] in ("test.json", "labels.json")}
    return {"tested": run.tested, "files": files, **settings}


def unprotected_method(runs: Sequence[Run]) -> str | None:
    """Return the method that protects nothing: seq-lora, or else the first that is a baseline of the catalog."""
    plain = [list(METHODS.baseline(family).phrases) for family in FAMILIES]
    bare = [method for method, group in by_method(runs).items() if all(run.record.method.parts in plain for run in group)]
    return PLAIN if PLAIN in bare else next(iter(bare), None)


def exact_methods(runs: Sequence[Run]) -> list[str]:
    """Return the methods whose rho counts as zero after every task of every run, from the highest mean AA to the lowest."""
    kept = [(method, group) for method, group in by_method(runs).items() if all(run.record.drift for run in group)]
    exact = [(method, group) for method, group in kept if all(drift.exact for run in group for drift in run.record.drift)]
    return [method for method, group in sorted(exact, key=lambda item: -mean([run.record.scores.AA for run in item[1]]))]
