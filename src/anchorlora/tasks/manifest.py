"""Whether a data file is what it should be: hashes against the folder's own manifest and the official list.

Kinds: "official bytes" (git blob SHA-1 equal to the O-LoRA repository's), "own" for tasks that the official list does not know,
"altered" for an official path with other bytes; these three only the bytes decide. "subset ..." and others as a manifest declares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.schemas.json import Unreadable, load

MANIFEST_FILE = "MANIFEST.json"
OFFICIAL, OWN, ALTERED = "official bytes", "own", "altered"
LARGEST = 2**31  # bytes; the largest official file has some ten million


@dataclass(frozen=True)
class FileFacts:
    """A file's hashes, and what kind of file it was found to be."""

    path: Path
    sha256: str
    git_blob_sha1: str
    kind: str = OWN


def facts_of(path: Path) -> FileFacts:
    """SHA-256 and the SHA-1 that git gives the file's bytes.  Raises ValueError as `refuse_odd` does."""
    refuse_odd(path)
    data = path.read_bytes()
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False)
    return FileFacts(path, hashlib.sha256(data).hexdigest(), blob.hexdigest())


def refuse_odd(path: Path) -> None:
    """Raises ValueError for what is no regular file, and for a file larger than any data file."""
    if not path.is_file():
        raise InvalidValue(f"{path} is no regular file; put the data file in its place")
    if path.stat().st_size > LARGEST:
        raise InvalidValue(f"{path} is larger than {LARGEST} bytes, as no file of data is; take a part of it")


@cache
def official() -> dict[str, dict[str, Any]]:
    """Path in CL_Benchmark -> git blob SHA-1 and number of instances, for every file of the official repository."""
    return json.loads((files("anchorlora.tasks") / "official_files.json").read_text())["files"]


def kind_of(relative: str, facts: FileFacts) -> str:
    """The kind by the official list alone."""
    listed = official().get(relative)
    if listed is None:
        return OWN
    return OFFICIAL if listed["git_blob_sha1"] == facts.git_blob_sha1 else ALTERED


def believed(declared: str, found: str) -> str:
    """The kind of a file that has the bytes its manifest says: as declared, but for the kinds that only the bytes decide."""
    return found if found == OFFICIAL or declared.strip().lower() in (OFFICIAL, OWN, ALTERED) else declared


@dataclass(frozen=True)
class Manifest:
    """What MANIFEST.json says of the files beside it; empty when there is none."""

    path: Path
    files: Mapping[str, Mapping[str, Any]]

    @classmethod
    def beside(cls, root: Path) -> Manifest:
        path = root / MANIFEST_FILE
        if not path.is_file():
            return cls(path, {})
        try:
            content, reason = load(path), ""
        except Unreadable as error:
            content, reason = None, f": {error}"
        entries = content.get("files") if isinstance(content, dict) and content.get("schema") == 1 else None
        if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
            raise InvalidValue(f"{path} is no manifest of schema 1{reason}; make one with anchorlora data import")
        for name, entry in entries.items():
            if not (name + entry["sha256"] + entry["kind"]).isprintable():
                raise InvalidValue(f"{path} holds line breaks or controls in what it says of {name!r:.80}; take them out")
        return cls(path, entries)

    def judge(self, relative: str, facts: FileFacts) -> FileFacts:
        """The facts with their kind.  Raises ValueError, with both hashes, for bytes that were not expected."""
        declared, kind = self.files.get(relative), kind_of(relative, facts)
        if declared is not None:
            if declared["sha256"] != facts.sha256:
                hashes = f"{self.path.name} expects SHA-256 {declared['sha256']}, found {facts.sha256}"
                raise InvalidValue(f"{facts.path} is altered: {hashes}; fetch it again")
            return replace(facts, kind=believed(declared["kind"], kind))
        if kind == ALTERED:
            expected = official()[relative]["git_blob_sha1"]
            raise InvalidValue(
                f"{facts.path} is not the official file: git blob SHA-1 {expected} expected, {facts.git_blob_sha1} found; "
                "fetch it again, or adopt it as it is with anchorlora data import"
            )
        return replace(facts, kind=kind)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("kind"), str)
