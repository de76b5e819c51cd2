"""Runs as core tasks of a Ray cluster: each is the run's command as a process, on whatever node is free.

The caller stays and waits. A task whose worker or node dies begins again elsewhere, as does one whose run was interrupted; three
times each. If the caller ends, Ray ends its tasks, and the next call goes on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.errors import INTERRUPTED, InvalidValue, MissingExtra
from anchorlora_lab.grid.folder import HERE, beside, last_line, mark_failed, submitting
from anchorlora_lab.grid.scheduler import Command, OnOutcome, Outcome, Planned, command_line, nobody_watches, to_begin

AGAIN = 3  # times that an interrupted task begins again
DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG
ENDING = [number for number in signal.Signals if number.name in ("SIGTERM", "SIGINT", "SIGKILL")]


class Preempted(Exception):
    """The run was interrupted, and goes on when it is called again."""


@dataclass(frozen=True)
class RayEngine:
    """Tasks of the Ray cluster that RAY_ADDRESS names, or of the one on this machine.

    Args:
        max_running: Tasks at a time; as many as the cluster has room for by default.
        retry_failed: Begin runs that have failed, too.

    Example:
        >>> from anchorlora_lab.grid.ray import RayEngine
        >>> RayEngine(max_running=8).max_running
        8
    """

    max_running: int | None = None
    retry_failed: bool = False

    def check(self) -> None:
        """Find what is wrong with the request before anything is written.

        Raises:
            MissingExtra: Ray is not installed.
            InvalidValue: No cluster answers.
        """
        _connect()

    def run(
        self, planned: Sequence[Planned], *, root: Path, watch: OnOutcome = nobody_watches, command: Command = command_line
    ) -> list[Outcome]:
        """Carry out the runs that are missing, and wait for them.

        Args:
            planned: The runs, finished ones included.
            root: A folder that holds all of them, on storage that the nodes share.
            watch: Called with each outcome.
            command: Returns the command line that fills a claimed run directory.

        Returns:
            One outcome for each run that was missing, in the order in which they ended.

        Raises:
            MissingExtra: Ray is not installed.
            InvalidValue: No cluster answers, a node does not see the folder, or somebody else is submitting.
        """
        if all(run.done for run in planned):
            return []
        ray = _connect()
        with submitting(root):
            waiting, ended = to_begin(planned, root, given={}, retry_failed=self.retry_failed)
            for outcome in ended:
                watch(outcome)
            task = ray.remote(max_retries=AGAIN, retry_exceptions=[Preempted])(carry_out)
            gpus = ray.cluster_resources().get("GPU", 0)
            running: dict[Any, tuple[Planned, float]] = {}
            most = self.max_running or len(waiting)
            try:
                while waiting or running:
                    while waiting and len(running) < most:
                        run = waiting.pop(0)
                        sized = task.options(num_cpus=1, num_gpus=int(gpus > 0 and run.config.recipe.base_model.device != "cpu"))
                        words = command(run.folder.absolute(), run.config)
                        reference = sized.remote(words, str(run.folder.absolute()), str(root.absolute()), os.getcwd())
                        running[reference] = run, time.monotonic()
                    for reference in ray.wait(list(running), num_returns=1)[0]:
                        run, began = running.pop(reference)
                        ended.append(_outcome(ray, reference, run, time.monotonic() - began))
                        watch(ended[-1])
            finally:
                for reference in running:
                    ray.cancel(reference, force=True)
        return ended


def carry_out(words: Sequence[str], folder: str, root: str, cwd: str) -> str | None:
    """Carry out a run on this machine as a process that ends with this one.

    Args:
        words: Its command.
        folder: The run directory.
        root: The folder of all runs.
        cwd: The folder that relative paths begin at, if it is there.

    Returns:
        Why it failed; None if it did not.

    Raises:
        InvalidValue: This machine does not see the folder.
        Preempted: The run was interrupted.

    Example:
        >>> import sys
        >>> from anchorlora_lab.grid.ray import carry_out
        >>> (tmp / ".runs").mkdir()
        >>> fails = [sys.executable, "-S", "-c", "raise SystemExit('error: no room')"]
        >>> carry_out(fails, str(tmp / "sfor"), str(tmp), str(tmp))
        'exit status 1: no room'
    """
    run, top = Path(folder), Path(root)
    if not (top / HERE).is_dir():
        raise InvalidValue(f"the node {socket.gethostname()} does not see {root}; choose an --out on storage that all nodes share")
    mark_failed(run, top, None)
    output = beside(run, top, "txt")
    with output.open("w") as out:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        there, ending = cwd if Path(cwd).is_dir() else None, _end_with_parent if sys.platform == "linux" else None
        process = subprocess.Popen(words, **streams, cwd=there, preexec_fn=ending)
        status = process.wait()
    if status == INTERRUPTED or -status in ENDING:
        raise Preempted(last_line(output, status))
    if status == 0:
        return None
    reason = last_line(output, status)
    mark_failed(run, top, reason)
    return reason


def _end_with_parent() -> None:
    """Have this process killed when its worker ends, or it would work on beside the task that begins again elsewhere."""
    ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)


def _outcome(ray: Any, reference: Any, planned: Planned, seconds: float) -> Outcome:
    try:
        reason = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InvalidValue):
            raise cause from None
        reason = str(cause)
    except ray.exceptions.RayError as error:
        reason = f"{type(error).__name__}: its worker ended {AGAIN + 1} times; the same command begins it again"
    return Outcome(planned, "done" if planned.done else "failed", reason or "", seconds)


def _connect() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MissingExtra("--engine ray needs Ray: pip install 'anchorlora[ray]'") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            _reach(address)
            ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InvalidValue(
                f"no Ray cluster answers at RAY_ADDRESS={address} ({reason:.200}); start one with `ray start --head`"
            ) from None
    return ray


def _reach(address: str) -> None:
    """Raise OSError at once where nobody listens; Ray itself would go on asking for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10.0).close()
