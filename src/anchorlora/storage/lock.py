"""One process at a time in a directory: a lease that its owner renews, so that what a dead owner left can be taken over.

The mechanism is filelock's: a file that names its owner, whose time of change is the heartbeat. An owner of this machine that has
ended is known at once; one that gives no sign of life for `LEASE` seconds, by the clock of who waits, has lost its lease. Since it
may only have been suspended, an owner looks at the file before everything that it writes.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from anchorlora.errors import InvalidValue, TakenOver

LEASE, HEARTBEAT = 60.0, 5.0  # seconds
LEASE_FILE = ".lease"
POLL = 0.2  # seconds


class InUse(InvalidValue):
    """Another process works there and is alive."""


class Lease:
    """The lease in `file`; many processes may have an object of it, one may hold it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lease = SoftFileLease(file, lease_duration=LEASE, heartbeat_interval=HEARTBEAT, thread_local=False, timeout=0)
        self._seen: tuple[int, int] | None = None

    def try_take(self) -> bool:
        """Take it where nobody holds it, or where its owner is known to be dead."""
        try:
            self._lease.acquire()
        except Timeout:
            return False
        except LeaseSettingsMismatch as error:
            raise InUse(f"{self.file} is of another version of this program ({error}); wait for it to end") from None
        return True

    def take(self) -> None:
        """Take it, and wait for a sign of life where somebody holds it.  Raises InUse as soon as there is one."""
        latest = time.monotonic() + 2 * LEASE
        while not self.try_take():
            if self.alive() or time.monotonic() > latest:
                raise InUse(f"{self.file.parent} is in use by {self.owner()}; wait for it to end, or choose another --out")
            time.sleep(POLL)

    def alive(self) -> bool:
        """Whether the owner has renewed it since this was first asked."""
        try:
            found = os.stat(self.file)
        except FileNotFoundError:
            return False
        now = (found.st_ino, found.st_mtime_ns)
        self._seen = self._seen or now
        return self._seen != now

    def owner(self) -> str:
        owner = self._lease.owner
        return f"process {owner.pid} on {owner.hostname.partition('?')[0]}" if owner else "another process"

    def check(self) -> None:
        """It is still ours.  Raises TakenOver."""
        for _ in range(3):
            if self._lease.compromise is None and self._ours():
                return
            time.sleep(POLL)  # who judges a lease moves it aside for a moment
        raise TakenOver(
            f"{self.file.parent} was taken over by {self.owner()} while this one gave no sign of life; nothing more is written"
        )

    @property
    def held(self) -> bool:
        """Whether this object has taken it; it may have lost it since."""
        return self._lease.is_locked

    def release(self) -> None:
        """Give it back; one that was lost is not touched."""
        self._lease.release()

    def leave(self) -> None:
        """Give it back as the process ends, from wherever that is: nothing is waited for."""
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
