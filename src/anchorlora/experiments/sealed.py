"""Folders that can be trusted: a manifest of hashes, written last, and everything on disk before the folder gets its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from anchorlora.experiments.files import new_folder, write_text

SEAL = "SEAL.json"


@contextmanager
def sealed_folder(path: Path, *, beside: Mapping[str, Path] | None = None) -> Iterator[Path]:
    """A folder that appears whole under its name, with the SHA-256 of each of its files in SEAL.json.

    beside: files elsewhere that belong to it, by the name under which their hashes are kept.
    """
    with new_folder(path) as folder:
        yield folder
        found = {"files": _hashes(folder), "beside": {name: sha256(file) for name, file in (beside or {}).items()}}
        write_text(folder / SEAL, json.dumps(found, indent=1, sort_keys=True))


def damage(path: Path, *, beside: Mapping[str, Path] | None = None) -> str | None:
    """What is wrong with a sealed folder, naming the file; None where every byte is what was written."""
    try:
        known = json.loads((path / SEAL).read_text(encoding="utf-8"))
        files, others = dict(known["files"]), dict(known["beside"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path / SEAL} cannot be read ({error})"
    there = {name: path / name for name in files} | {name: (beside or {}).get(name, path / name) for name in others}
    for name, wanted in {**files, **others}.items():
        if not there[name].is_file():
            return f"{there[name]} is missing"
        if sha256(there[name]) != wanted:
            return f"{there[name]} is not what was written: its hash differs"
    odd = set(_hashes(path)) - set(files) - {SEAL}
    return f"{path / sorted(odd)[0]} does not belong there" if odd else None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hashes(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}
