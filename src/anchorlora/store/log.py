"""The event log of a run, log.jsonl: one line per event, appended as it happens.  Nothing in a run depends on it.

Also marks on files that only grow, such as trace.jsonl: how much of the file belongs to a saved state, and whether that part is
unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.store.files import flush_file, write_lines
from anchorlora.store.json import Unreadable, bytes_of, loads
from anchorlora.store.seal import content_hash
from anchorlora.text import without_secrets

LARGEST_LOG = 2**31  # bytes


@dataclass(frozen=True)
class EventLog:
    """An event log."""

    path: Path
    check: Callable[[], None] = lambda: None  # called before a write; raises where the directory is another's

    def write(self, event: dict[str, Any]) -> None:
        """Append one event."""
        self.check()
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(without_secrets(json.dumps(event)) + "\n")

    def trim(self, finished: int, step: int = 0) -> None:
        """Drop the events of tasks that will be trained again."""

        def stays(event: dict[str, Any]) -> bool:
            task, at = event.get("task", 0), event.get("step", 0)
            if not isinstance(task, int) or not isinstance(at, int):
                return False
            return task <= finished or (task == finished + 1 and step > 0 and at <= step)

        if self.path.is_file():
            write_lines(self.path, [event for event in read_events(self.path) if stays(event)])


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a log, leaving out damaged and incomplete lines."""
    try:
        lines = bytes_of(path, largest=LARGEST_LOG).split(b"\n")
    except Unreadable as error:
        raise InvalidValue(f"{path}: {error}; move it away") from None
    events = []
    for line in lines:
        with suppress(Unreadable, UnicodeDecodeError):
            events.append(loads(line.decode()))
    return [event for event in events if isinstance(event, dict)]


@dataclass(frozen=True)
class PrefixHash:
    """Hash of the beginning of a file."""

    size: int  # length of that beginning in bytes
    sha256: str


def prefix_hash(path: Path) -> PrefixHash:
    """Return length and hash of a file as it is now, flushed to disk."""
    if not path.is_file():
        return PrefixHash(0, content_hash(b""))
    flush_file(path)
    content = path.read_bytes()
    return PrefixHash(len(content), content_hash(content))


def shrunk(path: Path, known: PrefixHash) -> str | None:
    """Return what is wrong with the hashed beginning of a file, naming the file; None if it is unchanged."""
    content = path.read_bytes() if path.is_file() else b""
    if len(content) < known.size:
        return f"{path} is shorter than it was: {len(content)} bytes of {known.size}"
    if content_hash(content[: known.size]) != known.sha256:
        return f"{path} is not what was written: the hash of its first {known.size} bytes differs"
    return None


def cut(path: Path, size: int) -> None:
    """Drop what was appended after a size."""
    if path.is_file():
        os.truncate(path, size)
