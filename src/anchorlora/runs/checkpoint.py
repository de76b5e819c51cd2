"""The state of a task that has begun and not ended: how far it is learned, or that it is learned and how far it is answered.

    <t>-begun/step-<q>/     after q optimizer steps; the two newest are kept
    <t>-begun/learned/      after its boundary: adapter, cores and what later tasks need
    <t>-begun/answers.json  texts of whole batches, with a hash of them and of the learned state that they belong to

Sealed folders, written whole and renamed, each with the hash of the state that the task began from. What is damaged, or was begun
from another state, is named and passed over for the next older one.
"""

from __future__ import annotations

from anchorlora.errors import InvalidValue

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from anchorlora.storage.tensors import write_tensors
from anchorlora.continual.progress import Learned, Progress
from anchorlora.errors import NotFinite
from anchorlora.features.files import read_tensors
from anchorlora.storage.files import write_text
from anchorlora.storage.log import Mark, mark, shrunk
from anchorlora.storage.manifest import damage, read_facts, sealed_folder, sha256, write_sealed
from anchorlora.schemas.json import read_sealed



KEPT = 2
FACTS, TENSORS, ANSWERS = "facts.json", "tensors.safetensors", "answers.json"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Begun:
    """The numbers of a task that is being learned; trace: how much of trace.jsonl was written then."""

    number: int
    step: int
    seconds: float
    stores: dict[str, str]
    trace: Mark


@dataclass(frozen=True)
class Boundary:
    """The numbers of a task that is learned and not answered."""

    drift: dict[str, Any] | None
    train_seconds: float
    trained_parameters: int
    history_bytes: int
    trace: Mark


@dataclass(frozen=True)
class Answers:
    """Texts by task and index of the example; of: SHA-256 of the facts of the learned state that gave them."""

    of: str
    seconds: float = 0.0
    texts: dict[str, dict[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The folder of one task's unfinished state.

    trace: the run's trace.jsonl; check: called before a write; beside: the seal of the state that it goes on from
    """

    root: Path
    trace: Path
    check: Callable[[], None] = lambda: None
    beside: Mapping[str, Path] = field(default_factory=dict)

    @property
    def learned(self) -> Path:
        return self.root / "learned"

    def write_progress(self, progress: Progress) -> None:
        """Save how far a task is learned; older ones but one go, and newer ones, from which nobody could go on."""
        self.check()
        with sealed_folder(self.root / _step(progress.step), beside=self.beside, check=self.check) as folder:
            write_tensors(folder / TENSORS, progress.tensors)
            begun = Begun(progress.number, progress.step, progress.seconds, progress.stores, mark(self.trace))
            write_text(folder / FACTS, json.dumps(asdict(begun), allow_nan=False))
        here = [folder for folder in self._steps() if folder.name <= _step(progress.step)]
        for old in {*self._steps()} - {*here[:KEPT]}:
            shutil.rmtree(old)

    def read_progress(self, number: int, tell: Tell) -> Progress | None:
        """The newest progress that is what was written; None where there is none."""
        for folder in self._steps():
            try:
                return self._progress(folder, number)
            except NotFinite:
                raise  # it is what was written, so an older state would come to it again
            except ValueError as error:
                tell(f"{error}; an older state is taken")
        return None

    def _progress(self, folder: Path, number: int) -> Progress:
        wrong = damage(folder, beside=self.beside)
        if wrong:
            raise InvalidValue(wrong)
        facts = read_facts(folder / FACTS, Begun)
        here = folder.name == _step(facts.step) and facts.number == number
        wrong = shrunk(self.trace, facts.trace) if here else f"{folder} is of step {facts.step} of task {facts.number}"
        if wrong:
            raise InvalidValue(wrong)
        return Progress(facts.number, facts.step, facts.seconds, read_tensors(folder / TENSORS), facts.stores)

    @contextmanager
    def write_learned(self, learned: Learned) -> Iterator[Path]:
        """A folder for what a learned task leaves, beside the numbers of it; progress of its learning goes."""
        self.check()
        with sealed_folder(self.learned, beside=self.beside, check=self.check) as folder:
            yield folder
            kept = (learned.drift, learned.train_seconds, learned.trained_parameters, learned.history_bytes)
            write_text(folder / FACTS, json.dumps(asdict(Boundary(*kept, mark(self.trace))), allow_nan=False))
            write_sealed(
                self.root / ANSWERS, asdict(Answers(sha256(folder / FACTS)))
            )  # before the folder, so that it is never missing
        for old in self._steps():
            shutil.rmtree(old)

    def read_learned(self, tell: Tell) -> Learned | None:
        """The numbers of a learned task with its answers so far; None where it is not learned yet."""
        if not self.learned.is_dir():
            return None
        try:
            facts = self._boundary()
        except ValueError as error:
            tell(f"{error}; the task is learned again")
            return None
        answers = self._read_answers(tell)
        return Learned(
            facts.drift, facts.train_seconds, facts.trained_parameters, facts.history_bytes, answers.seconds, answers.texts
        )

    def _boundary(self) -> Boundary:
        wrong = damage(self.learned, beside=self.beside)
        if wrong:
            raise InvalidValue(wrong)
        facts = read_facts(self.learned / FACTS, Boundary)
        wrong = shrunk(self.trace, facts.trace)
        if wrong:
            raise InvalidValue(wrong)
        return facts

    def write_answers(self, texts: dict[str, dict[int, str]], seconds: float) -> None:
        self.check()
        write_sealed(self.root / ANSWERS, asdict(Answers(sha256(self.learned / FACTS), seconds, texts)))

    def _read_answers(self, tell: Tell) -> Answers:
        none = Answers(sha256(self.learned / FACTS))
        try:
            found = read_sealed(self.root / ANSWERS, Answers)
            if found.of != none.of:
                raise InvalidValue(f"{self.root / ANSWERS} is not what was written: it belongs to another learned state")
            return found
        except ValueError as error:
            tell(f"{error}; all examples are asked again")
            return none

    def trace_size(self, step: int) -> int:
        """How much of trace.jsonl belongs to what was saved: after `step` steps, or, for 0, when the task was learned."""
        if step:
            return read_facts(self.root / _step(step) / FACTS, Begun).trace.size
        return read_facts(self.learned / FACTS, Boundary).trace.size

    def clear(self) -> None:
        """The task has ended: its state is elsewhere."""
        shutil.rmtree(self.root, ignore_errors=True)

    def newest(self) -> int:
        """The step of the newest progress by its name; 0 where there is none."""
        return int(self._steps()[0].name.removeprefix("step-")) if self._steps() else 0

    def _steps(self) -> list[Path]:
        """Newest first."""
        return sorted(self.root.glob("step-*"), reverse=True)


def _step(step: int) -> str:
    return f"step-{step:08d}"
