"""Let one process at a time work in a directory: a lease that its owner renews, so that a dead owner's directory can be taken over.

The mechanism is filelock's: a file that names its owner, whose modification time is the heartbeat. An owner on this machine that
has ended is detected at once; an owner that gives no sign of life for `LEASE` seconds, by the clock of the process that waits, has
lost its lease. It may only have been suspended, so an owner checks the file before everything that it writes.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from anchorlora.errors import InvalidValue, TakenOver

LEASE, HEARTBEAT = 60.0, 5.0  # seconds
LEASE_FILE = ".lease"
POLL = 0.2  # seconds


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals that ask the process to stop wait for the end of the block."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class InUse(InvalidValue):
    """Another process works in the directory and is alive."""


class Lease:
    """A lease in a file. Many processes may have an object for it; one may hold it."""

    _lent: ClassVar[dict[str, Lease]] = {}

    def __init__(self, file: Path) -> None:
        self.file = file
        self._outer = self._lent.get(os.path.abspath(file))
        self._lease = SoftFileLease(file, lease_duration=LEASE, heartbeat_interval=HEARTBEAT, thread_local=False, timeout=0)
        self._seen: tuple[int, int] | None = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let objects that the block creates for the same file share the lease that this one has taken."""
        key = os.path.abspath(self.file)
        self._lent[key] = self
        try:
            yield
        finally:
            del self._lent[key]

    def try_take(self) -> bool:
        """Take the lease if nobody holds it or its owner is known to be dead; return True if this object holds it now."""
        if self._outer is not None:
            return self._outer.held
        try:
            with _undisturbed():  # who is stopped between making the file and writing its name into it could not take it back
                self._lease.acquire()
        except Timeout:
            return False
        except LeaseSettingsMismatch as error:
            raise InUse(f"{self.file} is of another version of this program ({error}); wait for it to end") from None
        return True

    def take(self) -> None:
        """Take the lease, waiting for a sign of life if somebody holds it; raise InUse as soon as there is one."""
        latest = time.monotonic() + 2 * LEASE
        while not self.try_take():
            if self.alive() or time.monotonic() > latest:
                raise InUse(f"{self.file.parent} is in use by {self.owner()}; wait for it to end, or choose another --out")
            time.sleep(POLL)

    def alive(self) -> bool:
        """Return True if the owner has renewed the lease since this was first called."""
        try:
            stat = os.stat(self.file)
        except FileNotFoundError:
            return False
        now = (stat.st_ino, stat.st_mtime_ns)
        self._seen = self._seen or now
        return self._seen != now

    def live(self) -> bool:
        """Return True if the lease was renewed lately and its owner is not known to be dead; one look, nothing is written."""
        owner = self._lease.owner
        try:
            fresh = time.time() - os.stat(self.file).st_mtime < LEASE
        except FileNotFoundError:
            return False
        if owner is None or not fresh or owner.hostname.partition("?")[0] != socket.gethostname():
            return owner is not None and fresh
        import psutil  # which takes a while

        return psutil.pid_exists(owner.pid)

    def owner(self) -> str:
        """Return the owner in words, such as "process 4711 on host"."""
        owner = self._lease.owner
        return f"process {owner.pid} on {owner.hostname.partition('?')[0]}" if owner else "another process"

    def check(self) -> None:
        """Return if the lease is still ours, else raise TakenOver."""
        if self._outer is not None:
            self._outer.check()
            return
        for _ in range(3):
            if self._lease.compromise is None and self._ours():
                return
            time.sleep(POLL)  # who judges a lease moves it aside for a moment
        raise TakenOver(
            f"{self.file.parent} was taken over by {self.owner()} while this one gave no sign of life; nothing more is written"
        )

    @property
    def held(self) -> bool:
        """True if this object has taken the lease; it may have lost it since."""
        return self._outer.held if self._outer is not None else self._lease.is_locked

    def release(self) -> None:
        """Give the lease back; a lease that was lost is not touched."""
        self._lease.release()

    def leave(self) -> None:
        """Give the lease back while the process ends, from anywhere; wait for nothing."""
        if self._outer is not None:
            self._outer.leave()
            return
        with suppress(OSError):
            if self._lease.token is not None and self._ours():
                self.file.unlink()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _ours(self) -> bool:
        owner = self._lease.owner
        return owner is not None and owner.token == self._lease.token
