"""Files that hold a hash of themselves, and folders that hold the hashes of their files.

A sealed file is JSON that holds its content as text, and the SHA-256 of it. A sealed folder has a file of hashes (`Seal`), which is
written last, so that damage is found and named by file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from anchorlora.errors import InvalidValue
from anchorlora.paths import files_in
from anchorlora.store.files import new_folder, write_text
from anchorlora.store.json import FilePart, load, read_file, read_json

LARGEST_SEALED = 2**30  # bytes; answers of a whole task
AGAIN = "it is not what this program writes"
SEAL = "SEAL.json"
BEFORE = "before"  # name of the seal of the state that a folder continues from, among the files beside it
SETTLED = 2 * 10**9  # nanoseconds; a younger file can change again within one tick of its file system's clock
Kind = TypeVar("Kind")
_hashes: dict[tuple[int, ...], str] = {}  # device, inode, size and times of a file -> its SHA-256


class Seal(FilePart):
    """Hashes of a sealed folder."""

    files: dict[str, str]  # path in the folder -> SHA-256
    beside: dict[str, str]  # name of a file elsewhere that belongs to it -> SHA-256


def sealed(content: Any) -> str:
    """Return the text of a sealed file: the content with its hash."""
    text = json.dumps(content, allow_nan=False)
    return json.dumps({"sha256": content_hash(text), "content": text})


def read_sealed(path: Path, kind: type[Kind]) -> Kind:
    """Read what `sealed` made."""
    try:
        known = load(path, largest=LARGEST_SEALED)
        text = str(known["content"])
        wrong = "its hash differs" if content_hash(text) != known["sha256"] else None
    except FileNotFoundError:
        raise InvalidValue(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        raise InvalidValue(f"{path} is not what was written ({wrong})")
    return read_json(text, kind, where=str(path), remedy=AGAIN)


def write_sealed(path: Path, content: Any) -> None:
    """Write a file that `read_sealed` reads."""
    write_text(path, sealed(content))


@contextmanager
def sealed_folder(
    path: Path, *, beside: Mapping[str, Path] | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Yield a folder that gets its name whole, with the SHA-256 of each of its files in SEAL.json."""
    with new_folder(path, check=check) as folder:
        yield folder
        seal(folder, beside=beside)


def seal(folder: Path, *, beside: Mapping[str, Path] | None = None) -> None:
    """Write SEAL.json into a folder, with the SHA-256 of each of its files."""
    hashes = {"files": _hashes_in(folder), "beside": {name: sha256(file) for name, file in (beside or {}).items()}}
    write_text(folder / SEAL, json.dumps(hashes, indent=1, sort_keys=True))


def damage(path: Path, *, beside: Mapping[str, Path] | None = None) -> str | None:
    """Return what is wrong with a sealed folder, naming the file; None if every byte is what was written."""
    elsewhere = beside or {}
    try:
        known = read_file(path / SEAL, Seal, remedy="what was written cannot be told")
        files, others = known.files, known.beside
    except (OSError, ValueError) as error:
        return f"{path / SEAL} cannot be read ({error})"
    if foreign := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name]:
        return f"{path / SEAL} names {foreign[0]!r:.80}, which is not in its folder"
    if unknown := sorted(set(others) - set(elsewhere)):
        return f"{path / SEAL} names {unknown[0]!r:.80} beside its folder, which is not a file that belongs to it"
    there = {name: path / name for name in files} | {name: elsewhere[name] for name in others}
    for name, wanted in {**files, **others}.items():
        if not there[name].is_file():
            return f"{there[name]} is missing, which {path / SEAL} names"
        if sha256(there[name]) != wanted:
            if name == BEFORE:
                return f"{path} continues from another state than {there[name].parent}, which was trained again"
            return f"{there[name]} is not what was written: its hash differs from that in {path / SEAL}"
    odd = set(_hashes_in(path)) - set(files) - {SEAL}
    return f"{path / sorted(odd)[0]} does not belong there: {path / SEAL} does not name it" if odd else None


def read_facts(path: Path, kind: type[Kind]) -> Kind:
    """Read a JSON file of a sealed folder."""
    return read_file(path, kind, remedy=AGAIN)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file; a process reads a file once, unless it was touched since."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if (known := _hashes.get(identity)) is not None:
            return known
        is_settled = time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > SETTLED
        value = hash_of(file)
    if is_settled:
        _hashes[identity] = value
    return value


def content_hash(content: str | bytes) -> str:
    """Return the SHA-256 of a text or of bytes."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def hash_of(file: BinaryIO) -> str:
    """Return the SHA-256 of what is left of an open file."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _hashes_in(folder: Path) -> dict[str, str]:
    """Of all files but the seal itself, which may be there from the last time."""
    return {file.relative_to(folder).as_posix(): sha256(file) for file in files_in(folder) if file != folder / SEAL}
