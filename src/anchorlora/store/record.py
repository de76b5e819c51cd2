"""Schema 3 of record.json, the result of a finished run.  Imports scores only, never torch.

Accuracies are percent, their differences percentage points, ratios fractions; what is undefined is null, never 0. The record holds
the SHA-256 of every file that its numbers come from, and of itself.

The numerical tolerance on a ratio rho: the largest value that float32 storage of the factors explains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field

from anchorlora.errors import InvalidValue
from anchorlora.scores import Scores
from anchorlora.store.former import upgraded
from anchorlora.store.json import FilePart, Unreadable, checked, loads, text_of
from anchorlora.store.seal import content_hash, read_sealed

SCHEMA = 3
RECORD_FILE = "record.json"
LABELS_FILE = "labels.json"  # above records that were written before they counted labels
SEAL_FILE = "state/recorded.json"  # beside it: the text of the record, by a name that no report takes for one
UNSEALED = "0" * 64  # what stands in the place of the record's own hash while it is computed

Family = Literal["shared", "cumulative"]
Percent = Annotated[float, Field(ge=0, le=100)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
Inside = Annotated[str, Field(pattern=f"^{PART}(/{PART})*$")]  # a file of the run directory, never of another
MOST = 1e30  # nothing that a run measures comes near; squares and axes of larger numbers overflow
Amount = Annotated[float, Field(ge=-MOST, le=MOST)]


class MethodFacts(FilePart):
    """The facts of a method, so that nobody needs to read its definition."""

    name: str
    parts: Annotated[list[str], Field(min_length=1)]
    family: Family  # "shared" for one adapter that all tasks train, "cumulative" for one block per task
    preserves: list[str]  # the conditions that it promises, of `anchorlora.methods.Preserves`
    rehearses: bool  # whether stored examples of earlier tasks are trained on again
    grows: bool  # whether the stored adapter grows with every task

    @property
    def definition(self) -> str:
        """The sum as one line of Python."""
        return " + ".join(self.parts)


class BaseModelFacts(FilePart):
    """The base model: name, revision, fingerprint, number of parameters and type."""

    name: str
    revision: str | None
    sha256: str | None
    parameters: int
    dtype: str


class ScoreFacts(FilePart):
    """Scores of the whole sequence (see `anchorlora.Scores`): AA and LA in percent, BWT and FM in percentage points."""

    AA: Amount
    LA: Amount
    BWT: Amount | None
    FM: Amount | None


class HeldOut(FilePart):
    """Response to held-out feature rows: in total, on the core and off it."""

    total: Amount
    on_core: Amount
    off_core: Amount


class ChangeFacts(FilePart):
    """A change and its part on a core, as docs/rule.md defines them. Ratios are null where nothing moved."""

    task: int  # number of the task, from 1
    d_eff: Amount  # size of the change, |dW|
    d_old: Amount  # its part on protected directions, |dW V|
    d_new: Amount  # its part off them
    d_block: Amount  # size of the change of the task's own block
    rho: Amount | None  # d_old / d_eff
    rho_floor: Amount | None  # root-mean-square rho that rounding alone explains
    chance: Amount | None  # rho of a random change

    @property
    def bound(self) -> float:
        """Numerical tolerance: the largest rho that rounding explains."""
        return largest_zero(self.rho_floor)

    @property
    def exact(self) -> bool:
        """True if rho is within the numerical tolerance."""
        return is_zero(self.rho, self.rho_floor)


class DriftFacts(ChangeFacts):
    """Change of one task on the cores used during it."""

    rho_first: Amount | None  # rho on the cores of the first task
    rho_union: Amount | None  # rho on the cores of all past tasks together
    held_out: HeldOut | None  # response to held-out rows of earlier tasks
    predicted_kl: Amount | None = None


class LayerFacts(FilePart):
    """Core of one layer at the end of a task."""

    module: str
    k: int  # number of protected directions
    k_star: int | None  # number that the energy rule alone asks for
    retained_energy: Amount  # share of the squared singular values that the core holds
    rows: int  # feature rows that it was made from


class LabelCount(FilePart):
    """How many examples of a task have a label: of those that it was trained on, and of those that it was tested on."""

    train: Annotated[int, Field(ge=0)]
    test: Annotated[int, Field(ge=0)]


Labels = dict[str, dict[str, LabelCount]]  # task -> label -> counts; tasks without labels are left out


class Cost(FilePart):
    """Time in seconds, memory in bytes, and numbers of parameters."""

    train_seconds: list[Amount]
    evaluate_seconds: Amount
    peak_memory_bytes: int
    trained_parameters: int
    stored_parameters: int
    history_bytes: int


@dataclass(frozen=True)
class Recorded:
    """Where the record holds a number of a task."""

    place: str  # field of the record; dotted inside a section
    over_tasks: Callable[[list[Any]], Any] = list  # makes the record's value of all tasks' values; their list by default


def _defined(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _by_name(values: list[list[dict[str, float]]]) -> dict[str, list[list[float | None]]]:
    names = dict.fromkeys(name for row in values for scores in row for name in scores)
    return {name: [[scores.get(name) for scores in row] for row in values] for name in names}


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The numbers of one task of a run, each with its place in the record.

    Everything that saves, restores, reports or records a task's numbers takes them from here, so a new number is a field here and
    its type in the record. Before the task is tested, `accuracy` and `invalid` are empty and `evaluate_seconds` counts what was
    spent so far.
    """

    number: int  # from 1
    task: str
    accuracy: Annotated[list[float], Recorded("accuracy")]  # percent, of tasks 1 to `number`
    invalid: Annotated[list[float | None], Recorded("invalid")]  # percent of predictions that are no label, of the same tasks
    metrics: Annotated[list[dict[str, float]], Recorded("metrics", _by_name)] = field(default_factory=list)  # the same, by metric
    drift: Annotated[dict[str, Any] | None, Recorded("drift", _defined)]  # None for the first task
    layers: Annotated[list[dict[str, Any]], Recorded("layers")]  # how each layer's core came about
    train_seconds: Annotated[float, Recorded("cost.train_seconds")]
    evaluate_seconds: Annotated[float, Recorded("cost.evaluate_seconds", sum)]
    peak_memory_bytes: Annotated[int, Recorded("cost.peak_memory_bytes", max)]
    trained_parameters: Annotated[int, Recorded("cost.trained_parameters", itemgetter(-1))]
    stored_parameters: Annotated[int, Recorded("cost.stored_parameters", itemgetter(-1))]
    history_bytes: Annotated[int, Recorded("cost.history_bytes", itemgetter(-1))]

    @staticmethod
    def collected(results: Sequence[TaskResult]) -> dict[str, Any]:
        """Return the part of a record's content that tasks contribute.

        Args:
            results: The results of all tasks of a run, in order.

        Returns:
            Field of the record -> its value over all tasks.
        """
        content: dict[str, Any] = {}
        for name, hint in get_type_hints(TaskResult, include_extras=True).items():
            for where in getattr(hint, "__metadata__", ()):
                section, _, last = where.place.rpartition(".")
                into = content.setdefault(section, {}) if section else content
                into[last] = where.over_tasks([getattr(result, name) for result in results])
        return content


class DataFile(FilePart):
    """SHA-256 and kind of a data file."""

    sha256: str
    kind: str


class Record(FilePart):
    """Result of one finished run.

    Args:
        schema_: Version of the schema, "schema" in the file.
        method: The method.
        recipe: Name of the recipe.
        base_model: The base model.
        order: Names of the tasks in order.
        seed: The seed.
        protocol: Every setting.
        threads: CPU threads.
        accuracy: Lower triangle of accuracies in percent; row t holds tasks 1..t after training task t.
        invalid: Lower triangle of invalid predictions in percent, null for tasks without labels.
        metrics: Name of a metric -> lower triangle in percent (of "loss", in nats per token), null for tasks without it; None in
            records of earlier versions.
        scores: AA, LA, BWT and FM, of the accuracies.
        drift: Change of each task after the first.
        layers: For each task, the core of every layer.
        cost: Time, memory and parameters.
        versions: Library -> version.
        data: Data file -> hash and kind.
        labels: Task -> each of its labels -> how many of the examples that the run read have it; tasks without labels are left
            out. None in records of earlier versions.
        host: Machine.
        started: Time of the start.
        finished: Time of the end.
        files: File of the run directory -> SHA-256; None in records of earlier versions.
        sha256: SHA-256 of the record's own text, with zeros in its place.

    Example:
        >>> from pathlib import Path
        >>> record = read_record(Path("results/mini-en/trace/o-lora-2026/record.json"))
        >>> record.method.name, record.seed, len(record.order)
        ('o-lora', 2026, 2)
        >>> record.triangle.average == record.scores.AA
        True
    """

    schema_: Annotated[Literal[3], Field(alias="schema")] = 3
    method: MethodFacts
    recipe: str
    base_model: BaseModelFacts
    order: list[str]
    seed: int
    protocol: dict[str, Any]
    threads: int
    accuracy: list[list[Percent]]
    invalid: list[list[Percent | None]]
    metrics: dict[str, list[list[Amount | None]]] | None = None
    scores: ScoreFacts
    drift: list[DriftFacts]
    layers: list[list[LayerFacts]]
    cost: Cost
    versions: dict[str, str]
    data: dict[str, DataFile]
    labels: Labels | None = None
    host: dict[str, Any]
    started: str
    finished: str
    files: dict[Inside, Hash] | None = None  # of the run directory; None in records of versions before this field
    sha256: Hash | None = None  # of the record's own text, with UNSEALED in this place

    @property
    def triangle(self) -> Scores:
        """The accuracies as `anchorlora.Scores`."""
        return Scores.of(self.accuracy)

    def as_json(self) -> str:
        """Return the text of the file, with its own hash where it holds those of the run's files."""
        absent = {name for name in ("metrics", "labels") if getattr(self, name) is None}
        if self.files is None:
            return _text(self.model_dump(by_alias=True, exclude={"files", "sha256"} | absent))
        text = _text(self.model_dump(by_alias=True, exclude=absent) | {"sha256": UNSEALED})
        return _with_hash(text, UNSEALED, content_hash(text))


def read_record(path: Path) -> Record:
    """Read a record, and check that every byte is what the run wrote, if the record or a state beside it holds its hash.

    Records of schemas 1 and 2 are read in the words of schema 3.

    Args:
        path: The record.json.

    Raises:
        InvalidValue: The file is missing, damaged or not a record; the message names the file and the field.

    Example:
        >>> from pathlib import Path
        >>> record = read_record(Path("results/mini-en/trace/o-lora-2026/record.json"))
        >>> record.method.definition
        'PerTask() + RoutingOverlap(0.5)'
    """
    seal = path.parent / SEAL_FILE
    if seal.exists() and path.is_file() and read_sealed(seal, str).encode() != path.read_bytes():
        raise InvalidValue(
            f"{path} is not what was written, which is in {seal}; move the record away, and run it again to write it"
        )
    try:
        content = loads(text := text_of(path))
    except FileNotFoundError:
        raise InvalidValue(f"{path} is missing; a run writes it when it has finished") from None
    except Unreadable as error:
        raise InvalidValue(f"{path}: {error}; fetch it again") from None
    content = upgraded(content)
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise InvalidValue(f"{path} has schema {schema!r:.40}, and this version reads schemas 1 to {SCHEMA}")
    record = checked(content, Record, where=str(path), remedy="a record is written once and not edited")
    if record.sha256 and content_hash(_with_hash(text, record.sha256, UNSEALED)) != record.sha256:
        raise InvalidValue(f"{path} is not what was written: its hash differs from the one in it; fetch it again")
    try:
        _refuse_parts_that_do_not_fit(record)
    except ValueError as error:
        raise InvalidValue(f"{path}: {error}") from None
    return record


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _with_hash(text: str, old: str, new: str) -> str:
    """A record's text with another hash of itself, which is the last thing in it."""
    before, _, after = text.rpartition(old)
    return before + new + after


def _refuse_parts_that_do_not_fit(record: Record) -> None:
    """Raise ValueError for triangles and drifts whose number of tasks is not that of the order."""
    tasks = len(record.order)
    for triangle in (record.accuracy, [[value or 0.0 for value in row] for row in record.invalid]):
        Scores.of(triangle)
        if len(triangle) != tasks:
            raise InvalidValue(f"a triangle has {len(triangle)} rows, and the order {tasks} tasks")
    if not all(1 <= drift.task <= tasks for drift in record.drift):
        raise InvalidValue(f"a drift belongs to none of the {tasks} tasks")


SMALLEST = 1e-7  # below this nothing is told apart, however small the floor


def largest_zero(rho_floor: float | None) -> float:
    """Return the numerical tolerance on rho: max(1e-7, 3 rho_floor)."""
    return max(SMALLEST, 3 * (rho_floor or 0.0))


def is_zero(rho: float | None, rho_floor: float | None) -> bool:
    """Return True if rho is within the numerical tolerance; an undefined rho, where nothing moved, is."""
    return rho is None or rho <= largest_zero(rho_floor)
