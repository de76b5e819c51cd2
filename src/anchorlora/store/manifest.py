"""Folders with a manifest of hashes, which is written last, so that damage is found and named by file.

Single files hold a hash of themselves (`anchorlora.store.seal`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from anchorlora.errors import InvalidValue
from anchorlora.store.files import new_folder, write_text
from anchorlora.store.json import read_file
from anchorlora.store.seal import AGAIN, BEFORE, SEAL, Seal, sealed, sha256

Kind = TypeVar("Kind")
SKILL, VERDICT, ADAPTER = "skill", "verdict.json", "adapter"  # in the directory of `anchorlora train`
INPUTS = "inputs.json"  # in skill/
# what is read beside an adapter if it is there; `eval` writes eval.json there, and people a README
READ = ("*.safetensors", "*.bin", "*.jinja", "*.model", "*.txt", "*token*.json", "vocab.json")


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
    found = {"files": _hashes(folder), "beside": {name: sha256(file) for name, file in (beside or {}).items()}}
    write_text(folder / SEAL, json.dumps(found, indent=1, sort_keys=True))


def damage(path: Path, *, beside: Mapping[str, Path] | None = None) -> str | None:
    """Return what is wrong with a sealed folder, naming the file; None if every byte is what was written."""
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
        return f"{path / SEAL} names {unknown[0]!r:.80} beside its folder, which is not a file that belongs to it"
    there = {name: path / name for name in files} | {name: elsewhere[name] for name in others}
    for name, wanted in {**files, **others}.items():
        if not there[name].is_file():
            return f"{there[name]} is missing, which {path / SEAL} names"
        if sha256(there[name]) != wanted:
            if name == BEFORE:
                return f"{path} continues from another state than {there[name].parent}, which was trained again"
            return f"{there[name]} is not what was written: its hash differs from that in {path / SEAL}"
    odd = set(_hashes(path)) - set(files) - {SEAL}
    return f"{path / sorted(odd)[0]} does not belong there: {path / SEAL} does not name it" if odd else None


def is_sealed(out: Path) -> bool:
    """Return True if a skill was taught here to its end."""
    return (out / SKILL / VERDICT).is_file() and (out / SKILL / SEAL).is_file()


def refuse_damaged(out: Path) -> None:
    """Refuse a skill that was not taught to its end, or of which a file is not what was written."""
    skill = out / SKILL
    if not is_sealed(out):
        if (skill / "after").is_dir() and not (skill / INPUTS).is_file():
            raise InvalidValue(f"{out} was trained by an earlier version, which sealed nothing; train that skill again")
        raise InvalidValue(f"{out} has not been trained to its end; run its command again, then continue from it")
    published = out / ADAPTER
    refuse_links(skill)
    refuse_links(published)
    remedy = "put the file back"
    known = read_file(skill / SEAL, Seal, remedy="train the skill again, with another --out").beside
    wrong = damage(skill, beside={name: out / name for name in known if Path(name).parent == Path(ADAPTER)})
    if wrong is None and f"{ADAPTER}/adapter_model.safetensors" not in known:
        wrong = f"{skill / SEAL} does not name the adapter"
    if wrong is None:
        odd = [each for end in READ for each in sorted(published.glob(end)) if f"{ADAPTER}/{each.name}" not in known]
        wrong = f"{odd[0]} does not belong there: {skill / SEAL} does not name it" if odd else None
        remedy = "move it away" if odd else remedy
    if wrong is not None:
        raise InvalidValue(f"{wrong}; {remedy}, or train the skill again with another --out")


def refuse_links(folder: Path) -> None:
    """Refuse a folder of a run directory that is a link or holds one."""
    link = next((place for place in (folder, *sorted(folder.rglob("*"))) if place.is_symlink()), None)
    if link is not None:
        raise InvalidValue(f"{link} is a link, which is not followed in a run directory; put the file itself there")


def refuse_damaged_adapter(adapter: Path) -> None:
    """Refuse the published adapter of a skill that is damaged; adapters from elsewhere pass."""
    for place in dict.fromkeys((Path(os.path.abspath(adapter)), Path(os.path.realpath(adapter)))):
        skill = place.parent / SKILL  # one that lost its seal is damaged; one without inputs.json is of an earlier version
        if place.name == ADAPTER and (is_sealed(place.parent) or (skill / INPUTS).is_file()):
            refuse_damaged(place.parent)


def write_sealed(path: Path, content: Any) -> None:
    """Write a file that `anchorlora.store.seal.read_sealed` reads."""
    write_text(path, sealed(content))


def read_facts(path: Path, kind: type[Kind]) -> Kind:
    """Read a JSON file of a sealed folder."""
    return read_file(path, kind, remedy=AGAIN)


def _hashes(folder: Path) -> dict[str, str]:
    """Of all files but the seal itself, which may be there from the last time."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / SEAL)
    return {file.relative_to(folder).as_posix(): sha256(file) for file in files}
