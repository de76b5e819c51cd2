"""Cells: run directories that are still to be filled, each by one process of the command line.

A cell is a folder with a config.yaml and the command `anchorlora run FOLDER/config.yaml --out FOLDER`. A lock that the process
inherits tells other runners of the same folder to leave the cell alone; the system drops it when the process ends, however it does.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import torch

from anchorlora.continual.recipe import Cell
from anchorlora.experiments.directory import CONFIG_FILE, RunDirectory

POLL = 0.2  # seconds
HERE = ".cells"  # locks and what the processes said, beside the run directories


@dataclass(frozen=True)
class Planned:
    """A cell and where it runs.  `start`: a run whose first task it takes over instead of learning it."""

    folder: Path
    cell: Cell
    start: Path | None = None

    @property
    def done(self) -> bool:
        return RunDirectory(self.folder).record.exists()


@dataclass(frozen=True)
class Outcome:
    """done: it has a record now; failed: `error` says why; elsewhere: another process is running it."""

    planned: Planned
    status: Literal["done", "failed", "elsewhere"]
    error: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class _Process:
    planned: Planned
    process: subprocess.Popen
    lock: IO
    said: Path
    began: float = field(default_factory=time.monotonic)

    def outcome(self) -> Outcome:
        self.lock.close()
        seconds = time.monotonic() - self.began
        if self.planned.done:
            return Outcome(self.planned, "done", seconds=seconds)
        return Outcome(self.planned, "failed", _last_line(self.said, self.process.returncode), seconds)


def default_slots() -> int:
    """One run a GPU, or one a CPU core."""
    return torch.cuda.device_count() or os.cpu_count() or 1


def command_line(folder: Path) -> list[str]:
    return [sys.executable, "-m", "anchorlora", "run", str(folder / CONFIG_FILE), "--out", str(folder)]


def run_cells(
    planned: Sequence[Planned],
    *,
    root: Path,
    slots: int,
    watch: Callable[[Outcome], None] = lambda outcome: None,
    command: Callable[[Path], list[str]] = command_line,
) -> list[Outcome]:
    """Run the cells that have no record yet, `slots` at a time; one outcome for each of them, in the order of their end.

    A failed cell stops no other. On an interruption the processes are asked to stop, and are waited for. command: the words
    that fill a claimed folder.
    """
    waiting, running, ended = [p for p in planned if not p.done], list[_Process](), list[Outcome]()

    def end(outcome: Outcome) -> None:
        ended.append(outcome)
        watch(outcome)

    try:
        while waiting or running:
            while waiting and len(running) < slots:
                started = _start(waiting.pop(0), root, slots, command)
                end(started) if isinstance(started, Outcome) else running.append(started)
            time.sleep(POLL if running else 0)
            for each in [r for r in running if r.process.poll() is not None]:
                running.remove(each)
                end(each.outcome())
    finally:
        for each in running:
            each.process.send_signal(signal.SIGTERM)  # not SIGINT, which a shell's background jobs ignore
        for each in running:
            each.process.wait()
            each.lock.close()
    return ended


def _start(planned: Planned, root: Path, slots: int, command: Callable[[Path], list[str]]) -> _Process | Outcome:
    name = "-".join(planned.folder.relative_to(root).parts)
    (root / HERE).mkdir(parents=True, exist_ok=True)
    lock, said = (root / HERE / f"{name}.lock").open("a"), root / HERE / f"{name}.txt"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return Outcome(planned, "elsewhere")
    if planned.done:  # another runner finished it since the list was made
        lock.close()
        return Outcome(planned, "done")
    try:
        directory = RunDirectory(planned.folder)
        directory.claim(planned.cell)
        if planned.start is not None:
            directory.take_over(RunDirectory(planned.start), 1, planned.cell.order[0])
    except (ValueError, OSError) as error:
        lock.close()
        return Outcome(planned, "failed", str(error))
    with said.open("w") as out:
        process = subprocess.Popen(
            command(planned.folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(lock.fileno(),),
            env={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // slots)), **os.environ},
        )
    return _Process(planned, process, lock, said)


def _last_line(said: Path, status: int) -> str:
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    reason = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    return f"exit status {status}: {reason}"
