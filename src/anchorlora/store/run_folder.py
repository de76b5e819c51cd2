"""The directory of a run: every path in it, and the check that its files are what the run wrote.

    config.yaml, log.jsonl, trace.jsonl, record.json last
    tasks/<t>-<task>/{adapter,cores.safetensors,predictions.jsonl}
    state/    what a stopped run needs to go on: <t>/ of a finished task, <t>-begun/, provenance.json
    skill/    of `anchorlora train`, which puts the adapter in adapter/

The record of a finished run holds the hashes of its files. For a run that is not finished, and for one that an earlier version
finished, the seals in its state hold those of adapters and cores. Imports nothing that needs torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from anchorlora.config import RunConfig
from anchorlora.errors import InvalidValue
from anchorlora.paths import OF_FILE_MANAGERS
from anchorlora.store.adapter_config import ADAPTER_FILES
from anchorlora.store.files import load_yaml
from anchorlora.store.json import read_file
from anchorlora.store.lock import LEASE_FILE
from anchorlora.store.record import RECORD_FILE, SEAL_FILE, Record, read_record
from anchorlora.store.seal import AGAIN, BEFORE, SEAL, Seal, damage, sha256

CONFIG_FILE, TRACE_FILE, CORES_FILE, PREDICTIONS_FILE = "config.yaml", "trace.jsonl", "cores.safetensors", "predictions.jsonl"
LOG_FILE, TRACKERS = "log.jsonl", "trackers"  # the folder of what `--track` names: theirs, W&B's with links in it
RIGHT_FILE = "right.json"  # instead of the predictions, in collected results
ADAPTER, SKILL, INPUTS = "adapter", "skill", "inputs.json"
TASK_FILES = (*(f"{ADAPTER}/{name}" for name in ADAPTER_FILES), CORES_FILE, PREDICTIONS_FILE)
# left by a process that was killed
LEFT_OVER = (f".{CONFIG_FILE}.tmp", f".{LOG_FILE}.tmp", f".{RECORD_FILE}.tmp", "state/.*.tmp")
REMEDY = f"put it back, or call the run again, without {RECORD_FILE} if it has one"
# what is read beside a published adapter if it is there; `eval` writes eval.json there, and people a README
TOKENIZER = ("*.jinja", "*.model", "*.txt", "*token*.json", "vocab.json")
READ = ("*.safetensors", "*.bin", *TOKENIZER)


@dataclass(frozen=True)
class TaskFolder:
    """The folder of one task of a run."""

    path: Path
    adapter: Path  # folder of the adapter after the task
    cores: Path
    predictions: Path  # on every task so far


class _Below:
    """A path in a run directory."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, run: RunFolder, kind: type[RunFolder]) -> Path:
        return run.root.joinpath(*self.parts)


@dataclass(frozen=True)
class RunFolder:
    """The directory of a run, which may not exist yet."""

    root: Path
    config: RunConfig | None = None  # as `open` has read it
    record: Record | None = None  # the same; None for a run that is not finished

    config_file = _Below(CONFIG_FILE)  # if it exists, a run has begun here
    record_file = _Below(RECORD_FILE)  # if it exists, the run is finished
    record_seal = _Below(SEAL_FILE)  # the sealed text of the record, which counts from when this is there
    trace = _Below(TRACE_FILE)
    log_file = _Below(LOG_FILE)
    lease = _Below(LEASE_FILE)  # held by the process of the run
    states = _Below("state")  # may be deleted once the run has finished
    adapter = _Below(ADAPTER)  # published by `anchorlora train`
    skill = _Below(SKILL)  # what `anchorlora train` has kept, measured and judged
    verdict = _Below(SKILL, "verdict.json")
    inputs = _Below(SKILL, INPUTS)  # hashes of what `anchorlora train` reads

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        """Return a run directory that is read: with its configuration, and with the record if every file is what the run wrote."""
        run = cls(root)
        config = run.read_config()
        run.refuse_lost_record()
        return replace(run, config=config, record=run.read_record() if run.is_finished else None)

    def task(self, number: int, name: str) -> TaskFolder:
        """Return the folder of a task."""
        folder = self.root / "tasks" / f"{number}-{name}"
        return TaskFolder(folder, folder / ADAPTER, folder / CORES_FILE, folder / PREDICTIONS_FILE)

    def state(self, number: int) -> Path:
        """Return the folder of the state after a task."""
        return self.states / str(number)

    def state_begun(self, number: int) -> Path:
        """Return the folder of the state of a task that has begun and not ended."""
        return self.states / f"{number}-begun"

    @property
    def has_begun(self) -> bool:
        """True once a run has begun here."""
        return self.config_file.is_file()

    @property
    def is_finished(self) -> bool:
        """True once the run has a record."""
        return self.record_file.is_file()

    @property
    def is_taught(self) -> bool:
        """True if a skill was taught here to its end."""
        return self.verdict.is_file() and (self.skill / SEAL).is_file()

    def read_config(self) -> RunConfig:
        """Read the configuration."""
        return RunConfig.read(load_yaml(self.config_file), str(self.config_file))

    def read_record(self) -> Record:
        """Read the record of a finished run, and check every file of the run. A record without tasks/, as in a collection of
        records, stands for itself: only the trace beside it is checked.
        """
        record = read_record(self.record_file)
        known: Mapping[str, str] = record.files or {}
        if not (self.root / "tasks").is_dir():
            known = {name: value for name, value in known.items() if name == TRACE_FILE and self.trace.exists()}
        elif record.files is None:
            for number, task in enumerate(record.order, 1):
                self._compare_with_seal(number, task)
        self._compare(known, self.record_file)
        return record

    def refuse_lost_record(self) -> None:
        """Refuse a run that has finished but has no record anymore."""
        if self.record_seal.exists() and not self.record_file.exists():
            raise InvalidValue(
                f"{self.record_file} is missing, although the run has finished; anchorlora run {self.config_file} "
                f"--out {self.root} writes it again"
            )

    def refuse_altered_task(self, number: int, task: str) -> None:
        """Refuse the folder of a task that is not what the run wrote."""
        self.refuse_lost_record()
        record, folder = read_record(self.record_file) if self.record_file.exists() else None, self.task(number, task).path
        if record is None or record.files is None:
            self._compare_with_seal(number, task, finished=record is not None)
            return
        known = {name: value for name, value in record.files.items() if (self.root / name).is_relative_to(folder)}
        if not known:
            raise InvalidValue(f"{folder} is not a task of this run: {self.record_file} does not name it")
        self._compare(known, self.record_file)

    def _compare_with_seal(self, number: int, task: str, *, finished: bool = True) -> None:
        """Compare a task's files with the seal of its state, which may be deleted once the run has finished."""
        seal, folder = self.state(number) / SEAL, self.task(number, task).path
        if finished and not seal.exists():
            return
        try:
            beside = read_file(seal, Seal, remedy=AGAIN).beside
        except FileNotFoundError:
            raise InvalidValue(
                f"{folder} does not count yet: {seal} is missing, so it cannot be verified; "
                "resume the run, or copy the adapter out of the run directory to use it as it is"
            ) from None
        known = {str((folder / name).relative_to(self.root)): value for name, value in beside.items() if name in TASK_FILES}
        if not finished and BEFORE in beside:
            known[f"state/{number - 1}/{SEAL}"] = beside[BEFORE]
        self._compare(known, seal)

    def _compare(self, known: Mapping[str, str], where: Path) -> None:
        """Raise InvalidValue for a file whose hash is not the one in `where`."""
        for name, value in known.items():
            path = self.root / name
            if not path.is_file():
                raise InvalidValue(f"{path} is missing, which {where} names; {REMEDY}")
            if sha256(path) != value:
                raise InvalidValue(f"{path} is not what the run wrote: its hash differs from that in {where}; {REMEDY}")

    def refuse_damaged_skill(self) -> None:
        """Refuse a skill that was not taught to its end, or of which a file is not what was written."""
        out, seal = self.root, self.skill / SEAL
        if not self.is_taught:
            raise InvalidValue(f"{out} has not been trained to its end; run its command again, then continue from it")
        refuse_links(self.skill)
        refuse_links(self.adapter)
        remedy = "put the file back"
        known = read_file(seal, Seal, remedy="train the skill again, with another --out").beside
        wrong = damage(self.skill, beside={name: out / name for name in known if Path(name).parent == Path(ADAPTER)})
        if wrong is None and f"{ADAPTER}/adapter_model.safetensors" not in known:
            wrong = f"{seal} does not name the adapter"
        if wrong is None:
            files = (file for pattern in READ for file in sorted(self.adapter.glob(pattern)))
            odd = next((file for file in files if f"{ADAPTER}/{file.name}" not in known), None)
            wrong = f"{odd} does not belong there: {seal} does not name it" if odd else None
            remedy = "move it away" if odd else remedy
        if wrong is not None:
            raise InvalidValue(f"{wrong}; {remedy}, or train the skill again with another --out")


def spellings(path: Path) -> tuple[Path, ...]:
    """Return the absolute path as it is written, and the one with every link followed, if that is another."""
    return tuple(dict.fromkeys((Path(os.path.abspath(path)), Path(os.path.realpath(path)))))


def task_at(folder: Path) -> tuple[RunFolder, int, str] | None:
    """Return the run, number and name of the task whose folder this is, going by the path alone."""
    match = re.fullmatch(r"(\d{1,9})-(.+)", folder.name)
    return (RunFolder(folder.parent.parent), int(match[1]), match[2]) if match and folder.parent.name == "tasks" else None


def run_of(adapter: Path) -> RunFolder | None:
    """Return the finished run that wrote an adapter, going by the path alone."""
    parents = [path.parent for path in spellings(adapter) if path.name == ADAPTER]
    runs = [task[0] if (task := task_at(folder)) else RunFolder(folder) for folder in parents]
    return next((run for run in runs if run.is_finished), None)


def refuse_altered(path: Path) -> None:
    """Refuse the folder of a task in a run directory, or a file in it, that is not what the run wrote. Nothing is known about
    folders elsewhere, or where neither a record nor a state is left; they pass.
    """
    for spelling in spellings(path):
        for task in filter(None, map(task_at, (spelling, *spelling.parents)[:3])):
            run, number, name = task
            if run.is_finished or run.states.is_dir():
                run.refuse_altered_task(number, name)


def refuse_damaged_adapter(adapter: Path) -> None:
    """Refuse the published adapter of a skill that is damaged; adapters from elsewhere pass."""
    for path in spellings(adapter):
        run = RunFolder(path.parent)  # one that lost its seal is damaged; one without inputs.json is of an earlier version
        if path.name == ADAPTER and (run.is_taught or run.inputs.is_file()):
            run.refuse_damaged_skill()


def refuse_links(folder: Path) -> None:
    """Refuse a folder of a run directory that is a link or holds one."""
    if (link := next((path for path in (folder, *sorted(folder.rglob("*"))) if path.is_symlink()), None)) is not None:
        raise InvalidValue(f"{link} is a link, which is not followed in a run directory; put the file itself there")


def may_precede_config(path: Path) -> bool:
    """Return True for what may lie there before the configuration: of a process that waits, or was killed as it began."""
    killed = fnmatch(path.name, f".{SKILL}.*.tmp") or fnmatch(path.name, f".{ADAPTER}.*.tmp")
    return path.name.startswith(LEASE_FILE) or path.name in (LEFT_OVER[0], SKILL, *OF_FILE_MANAGERS) or killed
