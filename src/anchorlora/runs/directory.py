"""A run directory as the process of the run reads and writes it; `anchorlora.store.run_folder` knows what lies where.

A task's folder and then its state are renamed into place when they are whole. A run goes on after the last task that has a
state; what a later, unfinished task left is written again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anchorlora.adapters import read_adapter
from anchorlora.config import RunConfig, differences
from anchorlora.continual.callback import ResumePoint, TaskState
from anchorlora.continual.past import Past
from anchorlora.errors import InvalidValue
from anchorlora.features.files import read_tensors
from anchorlora.paths import start_of
from anchorlora.runs.checkpoint import (
    REMEMBERED,
    Checkpoint,
    SavedResult,
    predictions,
    read_boundary,
    write_boundary,
    write_outcome,
)
from anchorlora.runs.provenance import Provenance
from anchorlora.store.adapter_config import WEIGHTS_FILE
from anchorlora.store.files import dump_yaml, new_folder, write_first, write_lines, write_text
from anchorlora.store.json import loads, read_file
from anchorlora.store.log import EventLog
from anchorlora.store.record import Record, read_record
from anchorlora.store.run_folder import (
    ADAPTER,
    CONFIG_FILE,
    CORES_FILE,
    LEFT_OVER,
    PREDICTIONS_FILE,
    SKILL,
    TASK_FILES,
    TRACE_FILE,
    TRACKERS,
    RunFolder,
    may_precede_config,
)
from anchorlora.store.seal import AGAIN, BEFORE, SEAL, Seal, content_hash, read_sealed, sealed, sealed_folder, sha256, write_sealed

STACK = "stack.safetensors"


@dataclass(frozen=True)
class RunDirectory(RunFolder):
    """A run directory as the process of the run reads and writes it."""

    check: Callable[[], None] = lambda: None

    @property
    def provenance(self) -> Provenance:
        """Record of what the run began with."""
        return Provenance(self.states / "provenance.json", self.config_file)

    def standing(self) -> str:
        """Return what is saved, in words for a message."""
        done = max((int(p.name) for p in self.states.glob("[0-9]*") if p.name.isdigit()), default=0)
        checkpoint = self.checkpoint(done + 1)
        if checkpoint.trained.is_dir():
            return f"the state after task {done + 1} was trained is kept"
        if checkpoint.newest():
            return f"the state after step {checkpoint.newest()} of task {done + 1} is kept"
        return f"the state after task {done} is kept" if done else "nothing was saved before"

    def claim(self, config: RunConfig) -> None:
        """Make this the directory of a run, or find that it is already."""
        self.refuse_others(config)
        for path in [path for pattern in LEFT_OVER for path in self.root.glob(pattern) if path.is_file()]:
            path.unlink(missing_ok=True)
        if not self.config_file.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            write_text(self.config_file, dump_yaml(config.model_dump(mode="json")))

    def refuse_others(self, config: RunConfig) -> None:
        """Check that this is the directory of a run, or empty; write nothing."""
        self._refuse_links()
        if self.has_begun:
            self.refuse_another(config)
        elif self.root.exists() and any(not may_precede_config(path) for path in self.root.iterdir()):
            raise InvalidValue(f"{self.root} is not empty and is not a run directory (no {CONFIG_FILE}); choose another --out")

    def refuse_another(self, config: RunConfig) -> None:
        """Check that a run that has begun here is the one that is asked for."""
        known = self.read_config()
        if changed := differences(known, config, self._same):
            begins = start_of(known.recipe.tasks.data or "/") if any("tasks.data: " in field for field in changed) else ""
            raise InvalidValue(
                f"{self.config_file} belongs to another configuration ({'; '.join(changed[:3])}"
                f"{f'; and {len(changed) - 3} more' if len(changed) > 3 else ''}); choose another --out{begins}"
            )

    def _same(self, was: Any, now: Any) -> bool:
        was, now = (os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) else value for value in (was, now))
        root = Path(os.path.abspath(self.root))  # files that `train` keeps in skill/ may have been moved with the directory
        skills = [folder for folder in (root / SKILL, root.parent) if folder.name == SKILL]  # the twin's directory is in skill/
        skill = next((folder for folder in skills if str(now).startswith(f"{folder}{os.sep}")), None)
        return was == now if skill is None else str(was).endswith(str(now).removeprefix(str(skill.parent)))

    def finished_tasks(self, order: Sequence[str], tell: Callable[[str], None] = lambda sentence: None) -> list[SavedResult]:
        """Read the results of the finished tasks, up to the first whose files are not what was written."""
        results: list[SavedResult] = []
        for number, task in enumerate(order, 1):
            if not self.state(number).is_dir():
                break
            try:
                results.append(self._result(number, task))
            except ValueError as error:
                tell(f"{error}; task {number} is trained again")
                break
        return results

    def _result(self, number: int, task: str) -> SavedResult:
        return SavedResult.read(self.state(number), number, self.trace, self._beside(number, task))

    def write_task(self, state: TaskState, *, base: str, tokenizer: Any = None) -> SavedResult:
        """Save a finished task: first what the outside reads, a tokenizer as well, then the state that makes it count."""
        self.check()
        number, task = state.result.number, state.result.task
        result = SavedResult.of(state.result, self.trace)
        with new_folder(self.task(number, task).path, check=self.check) as folder:
            write_outcome(folder, state, base=base)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder / ADAPTER)
            write_lines(folder / PREDICTIONS_FILE, predictions(state))
        with sealed_folder(self.state(number), beside=self._beside(number, task), check=self.check) as folder:
            write_boundary(folder, state)
            result.write(folder)
        self.checkpoint(number).clear()
        return result

    def resume_point(
        self, past: Past, order: Sequence[str], done: Sequence[SavedResult], tell: Callable[[str], None]
    ) -> tuple[ResumePoint, int]:
        """Find where the run stopped: after a task, within one, or while one was being tested."""
        for result in done:
            self.checkpoint(result.number).clear()  # still there if the run ended just after the task's state had its name
        number, traced = len(done) + 1, done[-1].trace.size if done else 0
        for result in done:
            read_boundary(past, self.state(result.number), self.task(result.number, result.task).cores, result.layers)
        point = ResumePoint(past)
        if done:
            factors = read_adapter(self.task(done[-1].number, done[-1].task).adapter, beside={})
            point = replace(point, factors=factors, stack=read_tensors(self.state(done[-1].number) / STACK))
        if number > len(order):
            return point, traced
        checkpoint = self.checkpoint(number)
        if trained := checkpoint.read_trained(number, tell):
            result, answers = trained
            folder = checkpoint.trained
            read_boundary(past, folder, folder / CORES_FILE, result.layers)
            factors, stack = read_adapter(folder / ADAPTER, beside={}), read_tensors(folder / STACK)
            return ResumePoint(past, factors, stack, untested=result, texts=answers.texts), result.trace.size
        if progress := checkpoint.read_progress(number, tell):
            return replace(point, progress=progress), checkpoint.trace_size(progress.step)
        return point, traced

    def checkpoint(self, number: int) -> Checkpoint:
        """Return the place for the state of a task that has begun and not ended."""
        return Checkpoint(self.state_begun(number), self.trace, self.check, self._before(number))

    def files(self, done: Sequence[SavedResult]) -> dict[str, str]:
        """Return the SHA-256 of every file that a record stands on, by name, as it was written."""
        self.provenance.compare_config()
        hashes = {CONFIG_FILE: sha256(self.config_file)}
        if done[-1].trace.size:
            hashes[TRACE_FILE] = done[-1].trace.sha256
        for result in done:
            number, task = result.number, result.task
            try:
                self._result(number, task)
            except ValueError as error:
                raise InvalidValue(f"{error}; the same command trains task {number} again") from None
            known = read_file(self.state(number) / SEAL, Seal, remedy=AGAIN).beside
            for name in TASK_FILES:  # the seal of an earlier version lacks predictions
                path = self.task(number, task).path / name
                hashes[path.relative_to(self.root).as_posix()] = known.get(name) or sha256(path)
        return hashes

    def write_record(self, record: Record) -> Record:
        """Commit the record, once."""
        self.check()
        if not write_first(self.record_seal, sealed(record.as_json())) and self._committed_files() != record.files:
            write_sealed(self.record_seal, record.as_json())  # of a run that ended here, and was damaged since
        write_text(self.record_file, read_sealed(self.record_seal, str))
        return read_record(self.record_file)

    def _committed_files(self) -> dict[str, str] | None:
        """Hashes in the committed record; None where it cannot be read."""
        try:
            return loads(read_sealed(self.record_seal, str))["files"]
        except (ValueError, LookupError, TypeError):
            return None

    def finished(self) -> Record:
        """Return the record of a finished run whose files are all what was written."""
        if self.states.is_dir():  # it may be deleted now
            self.provenance.compare_config()
            read_sealed(self.record_seal, str)
        return self.read_record()

    @property
    def log(self) -> EventLog:
        """log.jsonl: one line per event."""
        return EventLog(self.log_file, self.check)

    def remembered(self, number: int) -> Path:
        """Return the file of what constraints remember after a finished task."""
        return self.state(number) / REMEMBERED

    def fingerprint(self, number: int, task: str) -> str:
        """Return the SHA-256 over a finished task's adapter and cores."""
        files = self.task(number, task).adapter / WEIGHTS_FILE, self.task(number, task).cores
        return content_hash(b"".join(bytes.fromhex(sha256(path)) for path in files))

    def take_over(self, other: RunDirectory, number: int, task: str) -> None:
        """Begin with a finished task of another run: its folder first, then the state that makes it count."""
        if not self.state(number).exists() and not other.state(number).is_dir():
            raise InvalidValue(
                f"{other.state(number)} was deleted, so nothing can begin from it; delete {other.root} to train it again"
            )
        tasks = self.task(number, task).path, other.task(number, task).path
        for to, source in (tasks, (self.state(number), other.state(number))):
            if not to.exists():
                with new_folder(to) as folder:
                    shutil.copytree(source, folder, dirs_exist_ok=True)
        if not self.provenance.path.exists():
            self.provenance.take_over(other.provenance)

    def _refuse_links(self) -> None:
        """A run that goes on replaces and deletes files in its own folder, never where somebody's link points to."""
        for folder, folders, files in os.walk(self.root):
            for path in (Path(folder) / name for name in (*folders, *files)):
                if path.is_symlink():
                    raise InvalidValue(f"{path} is a link, which is not followed in a run directory; choose another --out")
            if folder == str(self.root):
                folders[:] = [name for name in folders if name != TRACKERS]

    def _beside(self, number: int, task: str) -> dict[str, Path]:
        """The files of a task's own folder, and the seal of the state that the task began from."""
        folder = self.task(number, task).path
        return {name: folder / name for name in TASK_FILES} | self._before(number)

    def _before(self, number: int) -> dict[str, Path]:
        """The seal of the state before: once a task is trained again, nothing goes on that came after it the first time."""
        return {BEFORE: self.state(number - 1) / SEAL} if number > 1 else {}
