"""A file that only grows, such as trace.jsonl: how much of it belongs to a saved state, and that it is still what it was."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mark:
    """The first `size` bytes of the file, and the SHA-256 of them."""

    size: int
    sha256: str


def mark(path: Path) -> Mark:
    """Where the file ends now, which is on disk then; a file that is not there ends at its beginning."""
    if not path.is_file():
        return Mark(0, _sha256(b""))
    with path.open("rb") as file:
        content = file.read()
        os.fsync(file.fileno())
    return Mark(len(content), _sha256(content))


def shrunk(path: Path, known: Mark) -> str | None:
    """What is wrong with the part that was there, naming the file; None where it is what was written."""
    content = path.read_bytes() if path.is_file() else b""
    if len(content) < known.size:
        return f"{path} is shorter than it was: {len(content)} bytes of {known.size}"
    if _sha256(content[: known.size]) != known.sha256:
        return f"{path} is not what was written: the hash of its first {known.size} bytes differs"
    return None


def cut(path: Path, size: int) -> None:
    """Drop what was appended after the first `size` bytes."""
    if path.is_file():
        os.truncate(path, size)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
