"""Processes that begin with everything imported: a server pays for the imports once and forks a process per run.

    runner                                server                              process of a run
    python -m anchorlora.study.warm  ->   imports what a run needs
    words, output file, pipe         ->   forks                          ->   is `python -m anchorlora ..` from its first line on
    reads the pipe                   <-   waits, writes the exit status  <-   ends

The server starts no thread, computes nothing and opens no device, so a fork of it is what a fresh process is after its imports: the
same random streams, thread pools and libraries. If it cannot be had (another system, a failed import), processes start as usual.
It ends with its runner; processes of runs go on, as those without a server do.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TextIO

OURS = (sys.executable, "-m", "anchorlora")  # what a command must begin with to be forked
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
LIBRARIES = ("torch", "transformers.generation", "transformers.models.auto.modeling_auto")
WITH_PEFT = ("anchorlora.runs.run", "anchorlora.cli.run", "anchorlora.cli.progress", "anchorlora.reports.tables")
WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"  # set: torch.cuda.is_available() does not initialize CUDA, which no fork survives
LARGEST = 2**20  # bytes of a request
READY = b"ready"
UNKNOWN = 1  # the exit status of a process whose server was killed


class WarmProcess:
    """A process that the server forked; what an engine uses of `subprocess.Popen`.

    Args:
        pid: Its number.
        pipe: Where its exit status comes out; at the end of the file the process has ended and nobody knows how.

    Attributes:
        returncode: Exit status; negative for a signal, None while the process runs.
    """

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self._pipe = pid, pipe
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self.returncode is None:
            os.set_blocking(self._pipe, False)
            with suppress(BlockingIOError):
                self._read()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        if self.returncode is None:
            os.set_blocking(self._pipe, True)
        return self._read()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended.

        Args:
            number: The signal.
        """
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _read(self) -> int:
        if self.returncode is None:
            said = os.read(self._pipe, 16)
            self.returncode = int(said) if said else UNKNOWN
            os.close(self._pipe)
        return self.returncode


Process = subprocess.Popen | WarmProcess
Launch = Callable[[Sequence[str], Mapping[str, str], TextIO], Process]


@contextmanager
def launching(environment: Mapping[str, str], *, warm: bool) -> Iterator[Launch]:
    """Start processes in a block, each with its own output and environment.

    Args:
        environment: What all processes have in common.
        warm: Fork those of our own command line from a server, which starts with the first of them.

    Yields:
        A function of the words of a command, what its environment has of its own, and the file for stdout and stderr.

    Example:
        >>> import os, sys
        >>> from anchorlora.study.warm import launching
        >>> with (tmp / "said").open("w") as out, launching(os.environ, warm=True) as launch:
        ...     launch([sys.executable, "-S", "-c", "print('of its own'); raise SystemExit(3)"], {}, out).wait()
        3
        >>> (tmp / "said").read_text()
        'of its own\\n'
    """
    server: _Server | None = None

    def launch(words: Sequence[str], own: Mapping[str, str], out: TextIO) -> Process:
        nonlocal server
        if warm and sys.platform == "linux" and tuple(words[: len(OURS)]) == OURS:
            server = server or _Server(environment)
            process = server.start(words, own, out)
            if process is not None:
                return process
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**environment, **own})

    try:
        yield launch
    finally:
        if server is not None:
            server.close()


class _Server:
    """The runner's end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", "anchorlora.study.warm", str(theirs.fileno())]
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
            )
        self._ready: bool | None = None  # False: it is gone

    def start(self, words: Sequence[str], own: Mapping[str, str], out: TextIO) -> WarmProcess | None:
        """A process; None if the server is gone."""
        reading, writing = os.pipe()
        pid = b""
        try:
            with suppress(OSError):
                pid = self._ask(json.dumps([list(words), dict(own)]).encode(), [out.fileno(), writing])
        finally:
            os.close(writing)
            if not pid:
                os.close(reading)
                self._ready = False
        return WarmProcess(int(pid), reading) if pid else None

    def _ask(self, request: bytes, files: list[int]) -> bytes:
        if self._ready is None:
            self._ready = self._socket.recv(LARGEST) == READY
        if not self._ready:
            return b""
        socket.send_fds(self._socket, [request], files)
        try:
            return self._socket.recv(LARGEST)
        except BaseException:  # the runner is interrupted while the server forks
            with suppress(OSError, ValueError):
                os.kill(int(self._socket.recv(LARGEST)), signal.SIGTERM)
            raise

    def close(self) -> None:
        self._socket.close()
        self._process.kill()  # it has nothing to save, and may be importing
        self._process.wait()


def main() -> None:
    """Serve the runner at the other end of the socket that the command line names; in a forked process, be its command."""
    words = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _spoiled():
        os.execve(words[0], words, os.environ)
    sys.argv = words[len(OURS) - 1 :]
    runpy.run_module(OURS[-1], run_name="__main__", alter_sys=True)


def _serve(runner: socket.socket) -> list[str]:
    """Fork a process for every request.  Returns in each such process, and there only: the words of its command."""
    normal = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:  # they mean the runner and the runs; the server ends with the runner
        signal.signal(number, signal.SIG_IGN)
    _preload()
    if threading.active_count() > 1:
        os._exit(1)
    ended, ending = os.pipe()
    for end in (ended, ending):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(ending)
    running: dict[int, int] = {}  # process -> its pipe
    gc.freeze()  # what is imported stays shared
    runner.send(READY)
    while True:
        asking, _, _ = select.select([runner.fileno(), ended], [], [])
        _reap(running, ended)
        if runner.fileno() not in asking:
            continue
        request, files, _, _ = socket.recv_fds(runner, LARGEST, 2)
        if not request:
            os._exit(0)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # those that come now wait for the process's own handlers
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, handler in normal.items():
                signal.signal(number, handler)
            for each in (runner.detach(), ended, ending, *running.values()):
                os.close(each)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return _command(request, *files)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        out, running[pid] = files
        os.close(out)
        with suppress(OSError):
            runner.send(str(pid).encode())


def _preload() -> None:
    """Import what a run needs, without opening a device."""
    given = os.environ.get(WITHOUT_CUDA)
    os.environ[WITHOUT_CUDA] = "1"
    torch = import_module("torch")
    opens = find_spec("bitsandbytes") and (torch.version.cuda or torch.version.hip)  # peft imports it, and it looks at the device
    for name in (*LIBRARIES, *(() if opens else WITH_PEFT)):
        import_module(name)
    del os.environ[WITHOUT_CUDA]
    if given is not None:
        os.environ[WITHOUT_CUDA] = given


def _reap(running: dict[int, int], ended: int) -> None:
    with suppress(BlockingIOError):
        os.read(ended, LARGEST)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = running.pop(pid, None)
        if pipe is not None:
            with suppress(OSError):  # the runner may have ended
                os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(pipe)


def _command(request: bytes, out: int, pipe: int) -> list[str]:
    """Take the output and the environment of the request.  The pipe stays open: it tells the runner that the process lives."""
    words, own = json.loads(request)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.close(out)
    os.set_inheritable(pipe, False)
    os.environ.update(own)
    return words


def _spoiled() -> bool:
    """True if an import has opened a device, which a forked process cannot use; a fresh one takes its place then."""
    torch = import_module("torch")
    return torch.cuda._is_in_bad_fork() or torch.xpu._is_in_bad_fork()


if __name__ == "__main__":
    main()
