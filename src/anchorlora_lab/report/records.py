"""Finished runs, found and ordered, and statistics over them: means, and sample standard deviations (ddof 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean as mean
from typing import Any, Literal, TypeVar

from anchorlora.errors import InvalidValue
from anchorlora.store.adapter_config import adapter_sha256
from anchorlora.store.json import FilePart, Unreadable, read_file, read_json, text_of
from anchorlora.store.predictions import Right, read_predictions
from anchorlora.store.record import LABELS_FILE, RECORD_FILE, SEAL_FILE, Amount, ChangeFacts, Labels, Record
from anchorlora.store.run_folder import RIGHT_FILE, RunFolder
from anchorlora_lab.suites.evaluation import EVAL_FILE, Evaluation, read_evaluation

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Family = Literal["shared", "cumulative"]
FAMILIES: dict[Family, str] = {"shared": "shared adapter", "cumulative": "one block per task"}  # as words


@dataclass
class GradedAnswers:
    """Which test examples (task, index) a run answered right; None where an answer is neither right nor wrong."""

    learned: dict[tuple[str, int], bool | None]  # when their task had been learned
    last: dict[tuple[str, int], bool | None]  # at the end
    labels: dict[str, int]  # task -> how many different right answers its examples have
    known: bool  # no answer of any task after any task is neither


@dataclass(frozen=True)
class Run:
    """A finished run: its directory, its record, and what was measured beside it.

    Args:
        folder: The run directory.
        record: Its record.json.
        evaluation: Its eval.json, if there is one.
        trace: The points of a two-task mechanism trace; empty for a sequence.
        counted: The counts of a labels.json above it, for records without their own.
    """

    folder: Path
    record: Record
    evaluation: Evaluation | None = None
    trace: tuple[TracePoint, ...] = ()
    counted: Labels | None = None

    @property
    def labels(self) -> Labels:
        """Task -> label -> how many examples have it; empty if neither the record nor a labels.json says so."""
        return self.record.labels if self.record.labels is not None else self.counted or {}

    def setting(self, *path: str) -> Any:
        """Return a value of the protocol, which has any shape; None where it is not given.

        Args:
            *path: Names, from the outermost to the innermost.
        """
        value: Any = self.record.protocol
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def tested(self) -> dict[str, int]:
        """Task -> examples that it was tested on, of the tasks whose number the protocol gives."""
        examples = self.setting("examples")
        sizes = {task: self.setting("examples", task, "test") for task in examples} if isinstance(examples, dict) else {}
        return {task: n for task, n in sizes.items() if type(n) is int and n > 0}

    @property
    def trained(self) -> bool:
        """False for a run at learning rate 0, which tests the base model."""
        return self.setting("training", "learning_rate") != 0

    @property
    def method(self) -> str:
        """The method's name."""
        return self.record.method.name

    @property
    def order(self) -> tuple[str, ...]:
        """The tasks, in training order."""
        return tuple(self.record.order)

    @property
    def seed(self) -> int:
        """The seed."""
        return self.record.seed

    @property
    def family(self) -> Family:
        """ "shared" for one adapter that all tasks train, "cumulative" for one block per task."""
        return self.record.method.family

    def steps(self, task: str) -> int | None:
        """Return the optimizer steps of a task; None if the protocol does not give them.

        Args:
            task: One of the run's tasks.
        """
        sizes = (self.setting("examples", task, "train"), self.setting("training", "epochs"), self.setting("training", "window"))
        examples, epochs, window = sizes
        return epochs * -(-examples // window) if all(type(n) is int and n > 0 for n in sizes) else None

    @cached_property
    def answers(self) -> dict[str, dict[tuple[str, int], bool]]:
        """Which test examples (task, index) were answered right: at the end ("AA"), and when their task had been learned ("LA").

        Read from every task's predictions, or from right.json, which `tools/collect.py` makes of them. Empty without either, or
        if an answer is neither right nor wrong.
        """
        kept = self.folder / RIGHT_FILE
        if kept.is_file():
            digits: Right = read_file(kept, Right, remedy="collect the runs again")
            return {
                name: {(task, i): digit == "1" for task, row in tasks.items() for i, digit in enumerate(row)}
                for name, tasks in digits.items()
            }
        graded = self.graded
        return {"AA": graded.last, "LA": graded.learned} if graded and graded.known else {}  # type: ignore[dict-item]  # no None then

    @cached_property
    def graded(self) -> GradedAnswers | None:
        """Every task's predictions, read once; None where a file is not there."""
        files = [RunFolder(self.folder).task(number, task).predictions for number, task in enumerate(self.order, 1)]
        if not all(path.is_file() for path in files):
            return None
        answers = GradedAnswers({}, {}, {}, known=True)
        for task, path in zip(self.order, files, strict=True):
            last, labels = {}, set()
            for prediction in read_predictions(path):
                last[prediction.task, prediction.index] = right = prediction.right
                answers.known = answers.known and right is not None
                if prediction.task == task:
                    answers.learned[task, prediction.index] = right
                    labels.add(prediction.gold)
            answers.last, answers.labels[task] = last, len(labels)
        return answers

    @property
    def task1_state(self) -> str | None:
        """Hash of the state that a mechanism trace starts from; None if the protocol has none."""
        named = self.setting("task1_state")
        return named if isinstance(named, str) else None

    @property
    def energy_asked(self) -> float | None:
        """The share of energy that cores should retain (a fraction); None if the protocol does not give it."""
        share = self.setting("features", "energy")
        return share if isinstance(share, float) and 0 <= share <= 1 else None


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Find every finished run in some folders, at any depth.

    For records that do not count labels, a file labels.json in one of these folders, or in a folder between it and the run, does.

    Args:
        folders: Run directories, or folders that hold them. A run found twice counts once.

    Raises:
        InvalidValue: If a folder holds no finished run, or one of its files is not what the run wrote.
    """
    runs: dict[Path, Run] = {}
    labels: dict[Path, Labels] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InvalidValue(f"{folder} is not a folder; give run directories, or folders that hold them")
        for seal in folder.rglob(SEAL_FILE):
            RunFolder(seal.parent.parent).refuse_lost_record()
        records = sorted(folder.rglob(RECORD_FILE))
        if not records:
            raise InvalidValue(f"{folder} holds no finished run: no {RECORD_FILE} in it")
        for path in records:
            if path.parent.resolve() not in runs:
                runs[path.parent.resolve()] = _read(path.parent, folder, labels)
    return list(runs.values())


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each method: shared adapters first, then one block per task; in each family from fewer parts to more.

    Args:
        runs: Any runs.
    """

    def rank(run: Run) -> tuple[int, int, str]:
        return list(FAMILIES).index(run.family), len(run.record.method.parts), run.method

    return group_by(sorted(runs, key=lambda run: (rank(run), run.order, run.seed)), lambda run: run.method)


def group_by(items: Iterable[Item], by: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by what they have in common, in the order in which they come.

    Args:
        items: Any items.
        by: Gives the key of an item.
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    return groups


def families_of(runs: Sequence[Run]) -> dict[Family, list[Run]]:
    """Return the runs of each family that has any.

    Args:
        runs: Any runs.
    """
    return {family: of_family for family in FAMILIES if (of_family := [run for run in runs if run.family == family])}


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none.

    Args:
        values: Numbers and Nones.
    """
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (ddof 1); None for fewer than two values.

    Args:
        values: Numbers.

    Example:
        >>> from anchorlora_lab.report.records import deviation
        >>> deviation([1.0, 2.0, 3.0])
        1.0
    """
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def deviation_of(values: Iterable[float | None]) -> float | None:
    """Return the sample standard deviation of the values that are not None.

    Args:
        values: Numbers and Nones.
    """
    return deviation([value for value in values if value is not None])


def _read(folder: Path, root: Path, labels: dict[Path, Labels]) -> Run:
    opened = RunFolder(folder)
    bare, path = Run(folder, opened.read_record()), opened.trace
    traced = path.exists() and len(bare.order) == 2 and bare.task1_state is not None
    points = read_trace(path, steps=bare.steps(bare.order[1])) if traced else ()
    return Run(folder, bare.record, _evaluation(bare), points, _labels_of(folder, root, labels))


def _labels_of(folder: Path, root: Path, read: dict[Path, Labels]) -> Labels | None:
    """The nearest labels.json from a run's folder up to the one that was asked for, which many runs share."""
    for above in (folder, *folder.parents):
        if (path := above / LABELS_FILE).is_file():
            if path not in read:
                read[path] = read_file(path, Labels, remedy="count them again with tools/count_labels.py, or remove it")
            return read[path]
        if above == root:
            break
    return None


def _evaluation(run: Run) -> Evaluation | None:
    """The run's eval.json.  Raises InvalidValue if it was measured with another adapter than the run's last."""
    path, adapter = run.folder / EVAL_FILE, RunFolder(run.folder).task(len(run.order), run.order[-1]).adapter
    evaluation = read_evaluation(path) if path.exists() else None
    if evaluation and adapter.is_dir() and evaluation.adapter_sha256 != adapter_sha256(adapter):
        raise InvalidValue(f"{path} was measured with another adapter than {adapter}; measure it again: anchorlora eval --force")
    return evaluation


LARGEST = 2**30  # bytes
REMEDY = "delete the run directory and trace it again"


class GradientNorms(FilePart):
    """Gradient norms of the task loss and of the penalties."""

    task: float | None
    penalties: float | None


class Displacements(FilePart):
    """How far the factors have moved in the task: Frobenius norms over all layers."""

    A: Amount
    B: Amount


class TracePoint(ChangeFacts):
    """One recorded step."""

    step: int  # optimizer step, from 0
    wrp_before: float | None  # |(A - A_pre) V| of the step as the optimizer made it
    wrp_after: float | None
    penalties: Mapping[str, float] = {}  # name -> value
    grad_norms: GradientNorms | None = None  # gradient norms of task loss and penalties
    moves: Displacements | None = None  # how far A and B have moved since the task began; None in traces of earlier versions
    layers: Mapping[str, Any] | None = None  # layer path -> the same numbers


def read_trace(path: Path, *, steps: int | None) -> tuple[TracePoint, ...]:
    """Read the points of a trace.

    Args:
        path: A trace.jsonl.
        steps: Optimizer steps of the task, where they are known: the last point must be of the last one.
    """
    try:
        text = text_of(path, largest=LARGEST).removesuffix("\n")
    except Unreadable as error:
        raise InvalidValue(f"{path}: {error}; {REMEDY}") from None
    lines = text.split("\n") if text else []
    places = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    points = tuple(read_json(line, TracePoint, where=where, remedy=REMEDY) for line, where in zip(lines, places, strict=True))
    if not points or points[0].step != 0:
        raise InvalidValue(f"{path}, line 1: a trace begins at step 0; {REMEDY}")
    for where, (before, after) in zip(places[1:], pairwise(points), strict=True):
        if after.step <= before.step:
            raise InvalidValue(f"{where}: step {after.step} follows step {before.step}; {REMEDY}")
    last = points[-1].step
    if last == 0 or last != (steps or last):
        raise InvalidValue(f"{places[-1]}: the trace ends at step {last} of {steps or 'an unknown number'}; {REMEDY}")
    return points
