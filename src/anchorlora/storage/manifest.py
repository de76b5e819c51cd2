"""State that can be trusted: folders with a manifest of hashes, which is written last; what is damaged is named, with the file.

Single files hold a hash of themselves (`anchorlora.schemas.json`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from anchorlora.schemas.json import AGAIN, BEFORE, SEAL, Seal, read_file, sealed, sha256
from anchorlora.storage.files import new_folder, write_text

Kind = TypeVar("Kind")


@contextmanager
def sealed_folder(
    path: Path, *, beside: Mapping[str, Path] | None = None, check: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """A folder that appears whole under its name, with the SHA-256 of each of its files in SEAL.json.

    beside: files elsewhere that belong to it, by the name under which their hashes are kept; check: as `new_folder` has it.
    """
    with new_folder(path, check=check) as folder:
        yield folder
        seal(folder, beside=beside)


def seal(folder: Path, *, beside: Mapping[str, Path] | None = None) -> None:
    found = {"files": _hashes(folder), "beside": {name: sha256(file) for name, file in (beside or {}).items()}}
    write_text(folder / SEAL, json.dumps(found, indent=1, sort_keys=True))


def damage(path: Path, *, beside: Mapping[str, Path] | None = None) -> str | None:
    """What is wrong with a sealed folder, naming the file; None where every byte is what was written.

    beside: where files elsewhere lie, by name; a seal may lack some of these names, and one that has others is damaged.
    """
    elsewhere = beside or {}
    try:
        known = read_file(path / SEAL, Seal, remedy="what was written cannot be told")
        files, others = known.files, known.beside
    except (OSError, ValueError) as error:
        return f"{path / SEAL} cannot be read ({error})"
    foreign = [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name]
    if foreign:
        return f"{path / SEAL} names {foreign[0]!r:.80}, which is not in its folder"
    unknown = sorted(set(others) - set(elsewhere))
    if unknown:
        return f"{path / SEAL} names {unknown[0]!r:.80} beside its folder, which is no file that belongs to it"
    there = {name: path / name for name in files} | {name: elsewhere[name] for name in others}
    for name, wanted in {**files, **others}.items():
        if not there[name].is_file():
            return f"{there[name]} is missing, which {path / SEAL} names"
        if sha256(there[name]) != wanted:
            if name == BEFORE:
                return f"{path} goes on from another state than {there[name].parent}, which was trained again"
            return f"{there[name]} is not what was written: its hash differs from that in {path / SEAL}"
    odd = set(_hashes(path)) - set(files) - {SEAL}
    return f"{path / sorted(odd)[0]} does not belong there: {path / SEAL} does not name it" if odd else None


def write_sealed(path: Path, content: Any) -> None:
    """A file that `anchorlora.schemas.json` reads."""
    write_text(path, sealed(content))


def read_facts(path: Path, kind: type[Kind]) -> Kind:
    """A JSON file of a sealed folder.  Raises ValueError that names the file and the field for another shape."""
    return read_file(path, kind, remedy=AGAIN)


def _hashes(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}
