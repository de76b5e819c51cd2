"""Processes that begin with everything imported: the fork server of `multiprocessing` imports once and forks a process per run.

The server starts no thread, computes nothing and opens no device, so a fork of it is what a fresh process is after its imports: the
same random streams, thread pools and libraries. If it cannot be had (another system, a failed import) or an import has opened CUDA,
which no fork survives, processes start as usual. It ends with its runner and their runs; runs outlive a runner that is killed.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
OURS = (sys.executable, "-m", "anchorlora")  # what a command must begin with to be forked
LIBRARIES = ("torch", "transformers.generation", "transformers.models.auto.modeling_auto")
WITH_PEFT = ("anchorlora.runs.run", "anchorlora.cli.run", "anchorlora.cli.progress", "anchorlora.pages.record")
WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"  # set: torch.cuda.is_available() does not initialize CUDA
UNKNOWN = 255  # the exit status of a process whose server was killed


class WarmProcess:
    """A process that the server forked, with what an engine uses of `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        status = self._process.exitcode
        return None if status == UNKNOWN and Path(f"/proc/{self.pid}").exists() else status

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


Process = subprocess.Popen | WarmProcess
Launch = Callable[[Sequence[str], Mapping[str, str], TextIO], Process]


@contextmanager
def launching(environment: Mapping[str, str], *, warm: bool) -> Iterator[Launch]:
    """Start processes in a block, each with its own output and environment."""
    server: Any = forkserver._forkserver  # there is one in a process, and no public way to end it
    ours = warm and sys.platform == "linux" and server._forkserver_pid is None
    forks = None if ours else False  # None: not tried

    def launch(words: Sequence[str], own: Mapping[str, str], out: TextIO) -> Process:
        nonlocal forks
        if forks is not False and tuple(words[: len(OURS)]) == OURS:
            try:
                forks = _serving(environment) if forks is None else _lives(server._forkserver_pid)
                if forks:
                    return WarmProcess(_fork(_command, list(words), {**environment, **own}, out.name))
            except (OSError, EOFError):  # it ended meanwhile
                forks = False
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**environment, **own})

    try:
        yield launch
    finally:
        if ours and server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)  # it has nothing to save, and may be importing
            server._stop()


def _lives(server: int) -> bool:
    """A server that died would be started again, in another environment."""
    return os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _serving(environment: Mapping[str, str]) -> bool:
    """Start the server, and return whether its forks can open a device."""
    torch = sys.modules.get("torch") or __import__("torch")
    opens = find_spec("bitsandbytes") and (torch.version.cuda or torch.version.hip)  # peft imports it, and it looks at the device
    preloaded = [*LIBRARIES, *(() if opens else WITH_PEFT)]
    forkserver.set_forkserver_preload(preloaded)
    before, its_own = dict(os.environ), {**environment, WITHOUT_CUDA: "1"}
    try:
        os.environ.clear()
        os.environ.update(its_own)
        resource_tracker.ensure_running()  # it unblocks signals
        with _block_signals(), _silent():  # signals mean the runner and the runs
            forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
        forkserver.set_forkserver_preload(["__main__"])
    tried = _fork(_can_compute, preloaded)  # an interruption that comes while the server imports leaves nothing behind
    tried.join()
    return tried.exitcode == 0


def _fork(target: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments, daemon=False)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # the runner's program may have no guard, and is none of a run's business
    try:
        if target is _can_compute:
            process.start()
        else:
            with _block_signals():
                process.start()
    except KeyboardInterrupt:
        if process.pid is not None:
            process.terminate()
        raise
    finally:
        sys.modules["__main__"] = main
    return process


@contextmanager
def _block_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _silent() -> Iterator[None]:
    """Give what starts here no output: it would hold this process's pipes open, and tell what libraries say at import."""
    sys.stdout.flush()
    with open(os.devnull, "w") as nowhere:
        kept = {stream: os.dup(stream) for stream in (1, 2)}
        for stream in kept:
            os.dup2(nowhere.fileno(), stream)
        try:
            yield
        finally:
            for stream, copy in kept.items():
                os.dup2(copy, stream)
                os.close(copy)


def _can_compute(preloaded: Sequence[str]) -> None:
    """Fail if the server lacks an import, or one of them has opened a device, which a forked process cannot use."""
    if not set(preloaded) <= set(sys.modules):
        os._exit(1)
    import torch

    os._exit(int(torch.cuda._is_in_bad_fork() or torch.xpu._is_in_bad_fork() or torch.cuda.is_initialized()))


def _command(words: list[str], environment: Mapping[str, str], output: str) -> None:
    """Be a command from its first line on; signals that came before now have waited."""
    gc.freeze()  # what is imported stays shared
    multiprocessing.set_start_method(None, force=True)  # as in a process of its own
    with open(output, "a") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words[len(OURS) - 1 :]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        runpy.run_module(OURS[-1], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
