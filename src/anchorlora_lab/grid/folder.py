"""The folder of many runs: what it says of each of them.  Reads and writes files alone; never imports torch.

    ROOT/<run>/record.json      the run is finished
    ROOT/.runs/planned.json     the folders of all runs that were asked for
    ROOT/.runs/NAME.lease       of the runner, from before a run's process starts until it has ended
    ROOT/.runs/NAME.txt         what the process printed
    ROOT/.runs/NAME.failed      why it failed; absent while it runs, and once it is finished

NAME is the folder of the run in one word.  Nothing else is kept, by any engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anchorlora.errors import InvalidValue
from anchorlora.store.files import load_yaml, write_text
from anchorlora.store.json import read_file
from anchorlora.store.lock import InUse, Lease
from anchorlora.store.log import read_events
from anchorlora.store.record import read_record
from anchorlora.store.run_folder import CONFIG_FILE, RunFolder

HERE = ".runs"
PLANNED, SUBMITTING = "planned.json", "submit.lease"
DEEPEST = 4  # folders between the root and a run: model, method, order and seed, and one to spare
State = Literal["done", "running", "failed", "left"]


@dataclass(frozen=True)
class RunState:
    """State of a run, as its folder tells it.

    Attributes:
        folder: The run directory, relative to the folder of all runs.
        state: "done", "running", "failed", or "left": it is neither finished nor failed, and no process works on it.
        error: The last line of a failed run.
        progress: The finished part of a run, from 0 to 1.
        seconds: Training and evaluation so far; of a run that has not finished, training alone.
        doing: The task that is trained now, and its step.
    """

    folder: str
    state: State
    error: str = ""
    progress: float = 0.0
    seconds: float = 0.0
    doing: str = ""


def beside(folder: Path, root: Path, kind: str) -> Path:
    """Return the file that the folder of all runs has for one of them.

    Args:
        folder: The run directory.
        root: The folder of all runs.
        kind: "lease", "txt" or "failed".

    Example:
        >>> from pathlib import Path
        >>> beside(Path("grid/sfor/order1-42"), Path("grid"), "txt").as_posix()
        'grid/.runs/sfor-order1-42.txt'
    """
    return root / HERE / f"{name_of(folder, root)}.{kind}"


def name_of(folder: Path, root: Path) -> str:
    """Return the folder of a run in one word.

    Args:
        folder: The run directory.
        root: The folder of all runs.
    """
    return "-".join(folder.relative_to(root).parts)


def remember(folders: Sequence[Path], root: Path) -> None:
    """Add runs to the list of those that were asked for.

    Args:
        folders: Their run directories.
        root: The folder of all runs.
    """
    asked = [folder.relative_to(root).as_posix() for folder in folders]
    known = _planned(root)
    if set(asked) - set(known):
        (root / HERE).mkdir(parents=True, exist_ok=True)
        write_text(root / HERE / PLANNED, json.dumps(list(dict.fromkeys([*known, *asked])), indent=1) + "\n")


def failure(folder: Path, root: Path) -> str | None:
    """Return why a run failed the last time; None if it has not.

    Args:
        folder: The run directory.
        root: The folder of all runs.
    """
    try:
        return beside(folder, root, "failed").read_text(errors="replace").strip() or "it said nothing"
    except FileNotFoundError:
        return None


def mark_failed(folder: Path, root: Path, reason: str | None) -> None:
    """Note that a run failed, or that it has begun again.

    Args:
        folder: The run directory.
        root: The folder of all runs.
        reason: Why it failed; None removes the note.

    Example:
        >>> (tmp / ".runs").mkdir()
        >>> mark_failed(tmp / "sfor", tmp, "exit status 2: the disk is full")
        >>> failure(tmp / "sfor", tmp)
        'exit status 2: the disk is full'
    """
    if reason is None:
        beside(folder, root, "failed").unlink(missing_ok=True)
    else:
        write_text(beside(folder, root, "failed"), reason + "\n")


def last_line(output: Path, status: int) -> str:
    """Return why a process failed: its exit status, and the last line that it printed.

    Args:
        output: The file with what it printed.
        status: Its exit status.
    """
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    reason = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    return f"exit status {status}: {reason}"


def submitting(root: Path) -> Lease:
    """Return the lease of the one who submits runs of a folder, taken.

    Args:
        root: The folder of all runs.

    Raises:
        InUse: Somebody else submits runs of this folder.
    """
    lease = Lease(root / HERE / SUBMITTING)
    (root / HERE).mkdir(parents=True, exist_ok=True)
    try:
        lease.take()
    except InUse:
        raise InUse(f"{root}: {lease.owner()} is submitting its runs; wait for it to end, or choose another --out") from None
    return lease


def states(root: Path) -> list[RunState]:
    """Return the state of every run of a folder, or of the one run that it is.

    Args:
        root: The folder of all runs, or a run directory.

    Raises:
        InvalidValue: There is no run in it.

    Example:
        >>> remember([tmp / "grid/sfor", tmp / "grid/ewc"], tmp / "grid")
        >>> mark_failed(tmp / "grid/ewc", tmp / "grid", "exit status 2: the disk is full")
        >>> [(run.folder, run.state) for run in states(tmp / "grid")]
        [('sfor', 'left'), ('ewc', 'failed')]
    """
    if _is_run(root):
        return [_state(root.absolute(), root.absolute().parent)]
    folders = [root / name for name in _planned(root)]
    folders += [folder for folder in _run_folders(root, DEEPEST) if folder not in folders]
    if not folders:
        raise InvalidValue(f"{root} holds no run (no {CONFIG_FILE}, no {HERE}/{PLANNED}); give the --out of a grid or of a run")
    return [_state(folder, root) for folder in folders]


def seconds_left(runs: Sequence[RunState]) -> float | None:
    """Return the seconds until all runs have ended, at the pace of those that have finished, as many at a time as run now.

    Before the first one has finished, the pace is that of the running ones' training.

    Args:
        runs: All runs of a folder.

    Returns:
        Seconds; None if nothing runs, or nothing has a pace yet.

    Example:
        >>> from anchorlora_lab.grid.folder import RunState, seconds_left
        >>> done, half = RunState("a", "done", seconds=60.0), RunState("b", "running", progress=0.5)
        >>> seconds_left([done, half, RunState("c", "left")])
        90.0
    """
    running = [run for run in runs if run.state == "running"]
    paces = [run.seconds for run in runs if run.state == "done" and run.seconds]
    paces = paces or [run.seconds / run.progress for run in running if run.progress and run.seconds]
    if not running or not paces:
        return None
    left = sum(1 - run.progress for run in running) + sum(run.state == "left" for run in runs)
    return left * sum(paces) / len(paces) / len(running)


def _state(folder: Path, shown_in: Path) -> RunState:
    name = folder.relative_to(shown_in).as_posix()
    root = next((parent for parent in folder.parents[: DEEPEST + 1] if (parent / HERE).is_dir()), shown_in)
    run = RunFolder(folder)
    if run.record_file.exists():
        try:
            cost = read_record(run.record_file).cost
        except ValueError as error:
            return RunState(name, "failed", error=str(error))
        return RunState(name, "done", progress=1.0, seconds=sum(cost.train_seconds) + cost.evaluate_seconds)
    runs = any(lease.live() for lease in (Lease(run.lease), Lease(beside(folder, root, "lease"))))
    progress, seconds, doing = _progress(folder)
    if runs:
        return RunState(name, "running", progress=progress, seconds=seconds, doing=doing)
    reason = failure(folder, root)
    return RunState(name, "failed" if reason else "left", error=reason or "", progress=progress, seconds=seconds)


def _progress(folder: Path) -> tuple[float, float, str]:
    """The finished part of a run by its log, the seconds of its steps, and what it does now."""
    log, config = RunFolder(folder).log_file, RunFolder(folder).config_file
    if not log.is_file() or not config.is_file():
        return 0.0, 0.0, ""
    finished, part, steps, seconds, doing = 0, 0.0, 0, 0.0, ""
    try:
        tasks = len(load_yaml(config)["order"])
        for event in read_events(log):
            kind = event.get("event")
            if kind == "task":
                steps, part, doing = int(event["steps"]), 0.0, f"task {event['task']}/{tasks} {event['name']}"
            elif kind == "step" and steps:
                part, seconds = event["step"] / steps, seconds + event["seconds"]
            elif kind == "evaluated":
                finished, part = int(event["task"]), 0.0
        return min(1.0, (finished + part) / tasks), seconds, f"{doing}, step {round(part * steps)} of {steps}" if part else doing
    except (ArithmeticError, LookupError, TypeError, ValueError):  # damaged: the run itself will say so
        return 0.0, 0.0, ""


def _planned(root: Path) -> list[str]:
    try:
        return read_file(root / HERE / PLANNED, list[str], remedy="delete it; the next call writes it again")
    except FileNotFoundError:
        return []


def _is_run(folder: Path) -> bool:
    return RunFolder(folder).has_begun or RunFolder(folder).is_finished


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """The run directories below a folder."""
    if _is_run(folder):
        yield folder
    elif depth and folder.is_dir():
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _run_folders(folder / entry.name, depth - 1)
