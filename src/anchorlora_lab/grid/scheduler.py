"""Runs that are still missing, each filled by one process of the command line.

A planned run is a folder with a config.yaml and the command `anchorlora run FOLDER/config.yaml --out FOLDER`. Two leases keep
other runners away from it, on this machine or another: the runner's, and that of the process in the run directory. Runs that
another runner has taken are told apart at the end: those that are still worked on, and those that were left behind.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from anchorlora.config import RunConfig
from anchorlora.errors import INTERRUPTED
from anchorlora.runs.directory import RunDirectory
from anchorlora.store.lock import POLL, Lease
from anchorlora.store.record import read_record
from anchorlora.store.run_folder import RunFolder
from anchorlora_lab.grid.folder import beside, failure, last_line, mark_failed
from anchorlora_lab.grid.slots import Device, devices_for, freest
from anchorlora_lab.grid.warm import Launch, Process, launching


@dataclass(frozen=True)
class Planned:
    """A run and its folder.

    Attributes:
        folder: The run directory.
        config: The run's configuration.
        start: A run whose first task this one takes over instead of training it.
    """

    folder: Path
    config: RunConfig
    start: Path | None = None

    @property
    def done(self) -> bool:
        """True once the run is finished."""
        return RunFolder(self.folder).record_file.exists()

    def refuse_another(self) -> None:
        """Refuse a finished run that is not this one: it would count as what nobody ran.

        Raises:
            InvalidValue: It has another configuration, or its record is damaged.
        """
        run = RunDirectory(self.folder)
        if self.done:
            read_record(run.record_file)
        if self.done and run.has_begun:  # collected records may come without a configuration
            run.refuse_another(self.config)


@dataclass(frozen=True)
class Outcome:
    """The end of a planned run.

    Attributes:
        planned: The run.
        status: "done": it has a record now; "failed": `error` says why; "submitted": it was handed over and not waited for;
            "elsewhere": another process is running it, or it was handed over earlier.
        error: The last line of a failed run.
        seconds: How long its process took.
        note: Where a run that was handed over is.
    """

    planned: Planned
    status: Literal["done", "failed", "submitted", "elsewhere"]
    error: str = ""
    seconds: float = 0.0
    note: str = ""


@dataclass(eq=False)
class _Process:
    planned: Planned
    process: Process
    lease: Lease
    root: Path
    device: Device | None
    began: float = field(default_factory=time.monotonic)

    def outcome(self) -> Outcome:
        self.lease.release()
        seconds = time.monotonic() - self.began
        if self.planned.done:
            return Outcome(self.planned, "done", seconds=seconds)
        with own_lease(self.planned) as lease:
            if not lease.try_take():
                return Outcome(self.planned, "elsewhere", seconds=seconds)
        status = self.process.wait()
        reason = last_line(beside(self.planned.folder, self.root, "txt"), status)
        if status != INTERRUPTED:
            mark_failed(self.planned.folder, self.root, reason)
        return Outcome(self.planned, "failed", reason, seconds)


def command_line(folder: Path, config: RunConfig) -> list[str]:
    """Return the command that fills a run directory.

    A model that runs code is named again, since no file is trusted with it.

    Args:
        folder: The run directory, with its config.yaml.
        config: The same configuration.

    Returns:
        The words of the command.
    """
    run = RunFolder(folder)
    words = [sys.executable, "-m", "anchorlora", "run", str(run.config_file), "--method", config.method, "--out", str(run.root)]
    commit = config.recipe.base_model.trust_remote_code
    return [*words, "--set", f"trust_remote_code={commit}"] if commit else words


Command = Callable[[Path, RunConfig], list[str]]
OnOutcome = Callable[[Outcome], None]


def nobody_watches(outcome: Outcome) -> None:
    """Do nothing with an outcome.

    Args:
        outcome: The outcome.
    """


class Engine(Protocol):
    """Carries out the runs of a grid, a trace or a selection (docs/extend.md).

    The command of a run may be called again at any time: it goes on where it stopped, does nothing where the run has finished,
    and refuses where another process works. An engine therefore keeps no state of its own: what is missing is read from the
    folder.
    """

    def run(
        self, planned: Sequence[Planned], *, root: Path, watch: OnOutcome = nobody_watches, command: Command = command_line
    ) -> list[Outcome]:
        """Carry out the runs that have no record yet: wait for them, or hand them over.

        A run that fails stops no other. When the caller is interrupted, processes that it started are asked to stop.

        Args:
            planned: The runs, finished ones included.
            root: A folder that holds all of them.
            watch: Called with each outcome.
            command: Returns the command line that fills a claimed run directory (`claim`).

        Returns:
            One outcome for each run that was missing, in the order in which they ended or were handed over.
        """
        ...


@dataclass(frozen=True)
class LocalEngine:
    """Processes on this machine, some at a time, each with one of the devices that its recipe allows.

    When the caller is interrupted, it asks the processes to stop and waits for them.

    Args:
        slots: Runs at a time.
        warm: Import libraries once and fork the processes of several runs (`grid/warm.py`), where the system can.

    Example:
        >>> import sys
        >>> from anchorlora.config import RunConfig
        >>> from anchorlora.recipes import mini
        >>> from anchorlora_lab.grid.scheduler import LocalEngine, Planned
        >>> planned = Planned(tmp / "sfor", RunConfig(method="sfor", order=("reviews", "news"), seed=42, recipe=mini()))
        >>> fails = lambda folder, config: [sys.executable, "-S", "-c", "raise SystemExit('error: no room')"]
        >>> [outcome] = LocalEngine(slots=1).run([planned], root=tmp, command=fails)
        >>> outcome.status, outcome.error
        ('failed', 'exit status 1: no room')
    """

    slots: int
    warm: bool = True

    def run(
        self, planned: Sequence[Planned], *, root: Path, watch: OnOutcome = nobody_watches, command: Command = command_line
    ) -> list[Outcome]:
        """Carry out the runs that have no record yet, and wait for them.

        Args:
            planned: The runs, finished ones included.
            root: A folder that holds all of them.
            watch: Called with each outcome.
            command: Returns the command line that fills a claimed run directory.

        Returns:
            One outcome for each run that was missing, in the order in which they ended.
        """
        waiting, running, ended = [p for p in planned if not p.done], list[_Process](), list[Outcome]()
        taken: list[Planned] = []  # by another runner
        devices = {asked: devices_for(asked) for asked in {_device(run) for run in planned}}

        def end(outcome: Outcome) -> None:
            ended.append(outcome)
            watch(outcome)

        common = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.slots)), **os.environ}
        with launching(common, warm=self.warm and len(waiting) > 1) as launch, _stopping(running):
            while waiting or running or taken:
                while waiting and len(running) < self.slots:
                    run = waiting.pop(0)
                    device = freest(devices[_device(run)], [r.device for r in running])
                    started = _start(run, root, device, command, launch)
                    if started is None:
                        taken.append(run)
                    else:
                        end(started) if isinstance(started, Outcome) else running.append(started)
                time.sleep(POLL if running else 0)
                for process in [r for r in running if r.process.poll() is not None]:
                    running.remove(process)
                    end(process.outcome())
                if taken and not waiting and not running:  # nothing else is left to do
                    waiting, elsewhere = left_behind(taken, root)
                    taken = []
                    for run in elsewhere:
                        end(Outcome(run, "elsewhere"))
        return ended


@contextmanager
def _stopping(running: list[_Process]) -> Iterator[None]:
    """Stop what still runs at the end of a block."""
    try:
        yield
    finally:
        for process in running:
            process.process.send_signal(signal.SIGTERM)  # not SIGINT, which a shell's background jobs ignore
        for process in running:
            process.process.wait()
            process.lease.release()


def _start(planned: Planned, root: Path, device: Device | None, command: Command, launch: Launch) -> _Process | Outcome | None:
    """The process of a run, how the run ended without one, or None where somebody else works on it."""
    lease = runners_lease(planned, root)
    lease.file.parent.mkdir(parents=True, exist_ok=True)
    if not lease.try_take():
        return None
    started: _Process | Outcome | None = None
    try:
        if planned.done:  # another runner finished it since the list was made
            started = Outcome(planned, "done")
        elif claim(planned):
            mark_failed(planned.folder, root, None)
            with beside(planned.folder, root, "txt").open("w") as out:
                process = launch(command(planned.folder, planned.config), device.environment if device else {}, out)
            started = _Process(planned, process, lease, root, device)
    except (ValueError, OSError) as error:
        started = Outcome(planned, "failed", str(error))
    if not isinstance(started, _Process):
        lease.release()
    return started


def claim(planned: Planned) -> bool:
    """Make the run directory with its config.yaml and, for a run of a trace, the first task that it takes over.

    Args:
        planned: The run.

    Returns:
        False where a process works in the directory.

    Raises:
        InvalidValue: The directory is of another configuration.

    Example:
        >>> from anchorlora.config import RunConfig
        >>> from anchorlora.recipes import mini
        >>> run = Planned(tmp / "sfor", RunConfig(method="sfor", order=("reviews", "news"), seed=42, recipe=mini()))
        >>> claim(run), (tmp / "sfor" / "config.yaml").is_file()
        (True, True)
    """
    directory = RunDirectory(planned.folder)
    directory.refuse_others(planned.config)
    directory.root.mkdir(parents=True, exist_ok=True)
    with own_lease(planned) as lease:
        if not lease.try_take():
            return False
        directory.claim(planned.config)
        if planned.start is not None:
            directory.take_over(RunDirectory(planned.start), 1, planned.config.order[0])
    return True


def to_begin(
    planned: Sequence[Planned], root: Path, *, given: Mapping[Path, str], retry_failed: bool
) -> tuple[list[Planned], list[Outcome]]:
    """Claim the runs that an engine should begin, and tell them from the other missing ones.

    Args:
        planned: The runs, finished ones included.
        root: The folder of all runs.
        given: Folders of runs that were handed over before and have not ended -> where they are.
        retry_failed: Begin runs that have failed, too.

    Returns:
        Runs to begin, and outcomes of the others: "failed", or "elsewhere".
    """
    begin: list[Planned] = []
    others: list[Outcome] = []
    for run in [p for p in planned if not p.done]:
        reason = failure(run.folder, root)
        try:
            if run.folder in given:
                others.append(Outcome(run, "elsewhere", note=given[run.folder]))
            elif reason is not None and not retry_failed:
                others.append(Outcome(run, "failed", reason))
            elif claim(run):
                mark_failed(run.folder, root, None)
                begin.append(run)
            else:
                others.append(Outcome(run, "elsewhere"))
        except (ValueError, OSError) as error:
            others.append(Outcome(run, "failed", str(error)))
    return begin, others


def _device(planned: Planned) -> str:
    return planned.config.recipe.base_model.device


def runners_lease(planned: Planned, root: Path) -> Lease:
    """Return the lease that a runner holds from before it starts a run's process until that has ended.

    Args:
        planned: The run.
        root: The folder of all runs.
    """
    return Lease(beside(planned.folder, root, "lease"))


def own_lease(planned: Planned) -> Lease:
    """Return the lease that a run's process holds itself, in case its runner dies.

    Args:
        planned: The run.
    """
    return Lease(RunFolder(planned.folder).lease)


def left_behind(taken: Sequence[Planned], root: Path) -> tuple[list[Planned], list[Planned]]:
    """Tell runs that nobody works on from those that somebody does, after a sign of life or when a lease has run out.

    Args:
        taken: Runs that another runner has taken.
        root: The folder of all runs.

    Returns:
        Runs that are free, and runs that are worked on.
    """
    free: list[Planned] = []
    alive: list[Planned] = []
    unknown = [(run, (runners_lease(run, root), own_lease(run))) for run in taken]
    while unknown:
        for run, leases in list(unknown):
            if run.done or all(_is_free(lease) for lease in leases):
                free.append(run)
            elif any(lease.alive() for lease in leases):
                alive.append(run)
        unknown = [(run, leases) for run, leases in unknown if run not in free and run not in alive]
        time.sleep(POLL if unknown else 0)
    return free, alive


def _is_free(lease: Lease) -> bool:
    """True if it can be taken; it is given back at once."""
    with lease:
        return not lease.file.parent.exists() or lease.try_take()
