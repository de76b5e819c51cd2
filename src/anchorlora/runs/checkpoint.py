"""The state of a task that has begun and not ended: how far it is trained, or that it is trained and how far it is tested.

    <t>-begun/step-<q>/     after q optimizer steps; the two newest are kept
    <t>-begun/trained/      after its boundary: adapter, cores and what later tasks need
    <t>-begun/answers.json  texts of whole batches, with a hash of them and of the trained state that they belong to

Sealed folders, written whole and renamed, each with the hash of the state that the task began from. What is damaged, or was begun
from another state, is named and passed over for the next older one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from anchorlora.adapters import write_adapter
from anchorlora.continual.callback import TaskState
from anchorlora.continual.past import Past
from anchorlora.continual.progress import Progress
from anchorlora.errors import InvalidValue, NotFinite
from anchorlora.features.files import basis_in, read_cores, read_tensors, write_cores
from anchorlora.features.store import LayerCore
from anchorlora.store.files import write_text
from anchorlora.store.json import checked
from anchorlora.store.log import PrefixHash, prefix_hash, shrunk
from anchorlora.store.record import LayerFacts, TaskResult
from anchorlora.store.run_folder import ADAPTER, CORES_FILE
from anchorlora.store.seal import damage, read_facts, read_sealed, sealed_folder, sha256, write_sealed
from anchorlora.store.tensors import write_tensors

KEPT = 2
REMEMBERED = "remembered.safetensors"
REMEDY = "delete the state of this task and of later ones; they are trained again"
FACTS, TENSORS, ANSWERS = "facts.json", "tensors.safetensors", "answers.json"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Begun:
    """The numbers of a task within its training."""

    number: int  # the task's place in the order, from 1
    step: int  # optimizer steps so far
    seconds: float  # seconds of training so far
    stores: dict[str, str]  # layer path -> store of its feature rows
    trace: PrefixHash  # how much of trace.jsonl was written then


Facts = TypeVar("Facts", Begun, "SavedResult")


def sound(folder: Path, kind: type[Facts], trace: Path, beside: Mapping[str, Path]) -> Facts:
    """Return the numbers of a state whose files are all what was written.  Raises InvalidValue."""
    if (wrong := damage(folder, beside=beside)) is None:
        facts = read_facts(folder / FACTS, kind)
        wrong = shrunk(trace, facts.trace)
    if wrong is not None:
        raise InvalidValue(wrong)
    return facts


@dataclass(frozen=True, kw_only=True)
class SavedResult(TaskResult):
    """A task's numbers as a state holds them."""

    trace: PrefixHash  # how much of trace.jsonl was written when they were saved

    @classmethod
    def of(cls, result: TaskResult, trace: Path) -> SavedResult:
        """Return a result with the hash of trace.jsonl as it is now."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(TaskResult)}, trace=prefix_hash(trace))

    @classmethod
    def read(cls, folder: Path, number: int, trace: Path, beside: Mapping[str, Path]) -> SavedResult:
        """Read the result of a task from the folder of its state.  Raises InvalidValue."""
        result = sound(folder, cls, trace, beside)
        if result.number != number:
            raise InvalidValue(f"{folder} is of task {result.number}")
        return result

    def write(self, folder: Path) -> None:
        """Write the numbers into the folder of a state."""
        write_text(folder / FACTS, json.dumps(asdict(self), allow_nan=False))


@dataclass(frozen=True)
class Answers:
    """Predictions so far of a trained task."""

    of: str  # SHA-256 of the numbers of the trained state that made them
    seconds: float = 0.0  # seconds of testing so far
    texts: dict[str, dict[int, str]] = field(default_factory=dict)  # predictions by task and index of the example


@dataclass(frozen=True)
class Checkpoint:
    """The folder of the state of one unfinished task."""

    root: Path
    trace: Path
    check: Callable[[], None] = lambda: None  # called before a write; raises where the directory belongs to another process by now
    beside: Mapping[str, Path] = field(default_factory=dict)  # the seal of the state that the task goes on from

    @property
    def trained(self) -> Path:
        """Folder of the trained task, which is not tested yet."""
        return self.root / "trained"

    def write_progress(self, progress: Progress) -> None:
        """Save how far a task is trained; of older states the newest stays, and newer ones go."""
        self.check()
        with sealed_folder(self.root / _step(progress.step), beside=self.beside, check=self.check) as folder:
            write_tensors(folder / TENSORS, progress.tensors)
            begun = Begun(progress.number, progress.step, progress.seconds, progress.stores, prefix_hash(self.trace))
            write_text(folder / FACTS, json.dumps(asdict(begun), allow_nan=False))
        here = [folder for folder in self._steps() if folder.name <= _step(progress.step)]
        for old in {*self._steps()} - {*here[:KEPT]}:
            shutil.rmtree(old)

    def read_progress(self, number: int, tell: Tell) -> Progress | None:
        """Read the newest progress whose files are what was written."""
        for folder in self._steps():
            try:
                return self._progress(folder, number)
            except NotFinite:
                raise  # it is what was written, so an older state would come to it again
            except ValueError as error:
                tell(f"{error}; an older state is used")
        return None

    def _progress(self, folder: Path, number: int) -> Progress:
        facts = sound(folder, Begun, self.trace, self.beside)
        if (folder.name, number) != (_step(facts.step), facts.number):
            raise InvalidValue(f"{folder} is of step {facts.step} of task {facts.number}")
        return Progress(facts.number, facts.step, facts.seconds, read_tensors(folder / TENSORS), facts.stores)

    def write_trained(self, state: TaskState, *, base: str) -> None:
        """Save a trained task, with its numbers so far; progress of its training goes."""
        self.check()
        with sealed_folder(self.trained, beside=self.beside, check=self.check) as folder:
            write_outcome(folder, state, base=base)
            write_boundary(folder, state)
            SavedResult.of(state.result, self.trace).write(folder)
            # before the folder, so that it is never missing
            write_sealed(self.root / ANSWERS, asdict(Answers(sha256(folder / FACTS))))
        for old in self._steps():
            shutil.rmtree(old)

    def read_trained(self, number: int, tell: Tell) -> tuple[SavedResult, Answers] | None:
        """Read the numbers of a trained task and its predictions so far."""
        if not self.trained.is_dir():
            return None
        try:
            result = SavedResult.read(self.trained, number, self.trace, self.beside)
        except ValueError as error:
            tell(f"{error}; the task is trained again")
            return None
        answers = self._read_answers(tell)
        return replace(result, evaluate_seconds=answers.seconds), answers

    def write_answers(self, texts: dict[str, dict[int, str]], seconds: float) -> None:
        """Save the predictions so far of a trained task."""
        self.check()
        write_sealed(self.root / ANSWERS, asdict(Answers(sha256(self.trained / FACTS), seconds, texts)))

    def _read_answers(self, tell: Tell) -> Answers:
        none = Answers(sha256(self.trained / FACTS))
        try:
            answers = read_sealed(self.root / ANSWERS, Answers)
            if answers.of != none.of:
                raise InvalidValue(f"{self.root / ANSWERS} is not what was written: it belongs to another trained state")
            return answers
        except ValueError as error:
            tell(f"{error}; all examples are evaluated again")
            return none

    def trace_size(self, step: int) -> int:
        """Return how many bytes of trace.jsonl belong to what was saved within the task."""
        return read_facts(self.root / _step(step) / FACTS, Begun).trace.size

    def clear(self) -> None:
        """Delete the state of a task that has ended; it is elsewhere by now."""
        shutil.rmtree(self.root, ignore_errors=True)

    def newest(self) -> int:
        """Step of the newest progress by its name; 0 where there is none."""
        return int(self._steps()[0].name.removeprefix("step-")) if self._steps() else 0

    def _steps(self) -> list[Path]:
        """Newest first."""
        return sorted(self.root.glob("step-*"), reverse=True)


def _step(step: int) -> str:
    return f"step-{step:08d}"


def write_outcome(folder: Path, state: TaskState, *, base: str) -> None:
    """Write what the outside reads of a task: its adapter and cores."""
    transposed, whole = state.fan_in_fan_out, state.whole
    write_adapter(folder / ADAPTER, state.factors, base=base, fan_in_fan_out=transposed, whole=whole)
    write_cores(folder / CORES_FILE, {layer: c.core for layer, c in state.cores.items()})


def write_boundary(folder: Path, state: TaskState) -> None:
    """Write what later tasks need: feature rows, wide bases, and what constraints and the adapter plan keep."""
    # layers that share their rows share the basis, unless a constraint has made cores of its own
    first = {id(core.wide): layer for layer, core in reversed(state.cores.items())}
    wides = {layer: core.wide.basis for layer, core in state.cores.items() if first[id(core.wide)] == layer}
    rows = {f"rows/{name}": t for name, t in state.rows.items()}
    for kind, tensors in (("rows", rows), ("wide", wides), ("remembered", state.remembered), ("stack", state.stack)):
        write_tensors(folder / f"{kind}.safetensors", tensors)
    write_text(folder / "stores.json", json.dumps(state.stores))


def read_boundary(past: Past, state: Path, cores_file: Path, facts: Sequence[dict[str, Any]]) -> None:
    """Append one finished task to the past."""
    stores = past.rows.stores = read_facts(state / "stores.json", dict[str, str])
    rows = {name.removeprefix("rows/"): t for name, t in read_tensors(state / "rows.safetensors").items()}
    cores = read_cores(cores_file)
    file = state / "wide.safetensors"
    wides = {store: basis_in(t, f"{file}: the basis of {store!r:.80}") for store, t in read_tensors(file).items()}
    layers = {layer.module: layer for layer in checked(list(facts), list[LayerFacts], where=str(state), remedy=REMEDY)}
    if not (stores.keys() <= cores.keys() and stores.keys() <= layers.keys() and set(stores.values()) <= wides.keys()):
        raise InvalidValue(f"{state} and {cores_file} are not of the same layers; {REMEDY}")
    widths = {store: cores[path].d for path, store in stores.items()}
    for name, t in rows.items():
        width = widths.get(name.partition("/")[2])
        if t.ndim != 2 or t.shape[1] != width or t.dtype != torch.float32:
            raise InvalidValue(f"{state}: {name} is {t.dtype} {tuple(t.shape)}, no rows of width {width}; {REMEDY}")
    past.rows.restore_task(rows)
    made = {
        path: LayerCore(
            cores[path], wides.get(path, wides[store]), layers[path].k_star, layers[path].retained_energy, layers[path].rows
        )
        for path, store in stores.items()
    }
    past.append(made, read_tensors(state / REMEMBERED))


def predictions(state: TaskState) -> list[dict[str, Any]]:
    """Return the lines of a task's predictions.jsonl."""
    return [
        {
            "task": task,
            "index": encoded.example.index,
            "prompt_sha256": encoded.prompt_sha256,
            "text": answer.text,
            "label": answer.label,
            "gold": answer.gold,
            "metrics": dict(answer.scores),
        }
        for task, pairs in state.predictions.items()
        for encoded, answer in pairs
    ]
