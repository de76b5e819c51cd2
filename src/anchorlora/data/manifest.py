"""Check data files against the folder's own manifest and the official list of hashes.

Kinds: "official bytes" (git blob SHA-1 equal to the O-LoRA repository's), "own" for tasks that the official list does not name,
"altered" for an official path with other bytes. The bytes alone decide these three; "subset ..." and other kinds are declared by
the manifest.
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
from anchorlora.store.json import Unreadable, load

MANIFEST_FILE = "MANIFEST.json"
OFFICIAL, OWN, ALTERED = "official bytes", "own", "altered"
LARGEST = 2**31  # bytes; the largest official file has some ten million
PART = 2**20  # bytes read at once


@dataclass(frozen=True)
class FileFacts:
    """Hashes and kind of a data file."""

    path: Path
    sha256: str
    git_blob_sha1: str  # SHA-1 that git gives its bytes
    kind: str = OWN  # "official bytes", "own", "altered", or what a manifest declares


def facts_of(path: Path, *, largest: int = LARGEST) -> FileFacts:
    """Return the hashes of a data file, which is not read into memory."""
    refuse_odd(path, largest=largest)
    whole, blob = hashlib.sha256(), hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(PART):
            whole.update(part)
            blob.update(part)
    return FileFacts(path, whole.hexdigest(), blob.hexdigest())


def refuse_odd(path: Path, *, largest: int = LARGEST) -> None:
    """Refuse anything but a regular file of reasonable size."""
    if not path.is_file():
        raise InvalidValue(f"{path} is not a regular file; put the data file in its place")
    if path.stat().st_size > largest:
        raise InvalidValue(f"{path} is larger than {largest} bytes, too large for a data file; use a part of it")


@cache
def official() -> dict[str, dict[str, Any]]:
    """Return path in CL_Benchmark -> git blob SHA-1 and number of instances, for every file of the official repository."""
    return json.loads((files("anchorlora.data") / "official_files.json").read_text(encoding="utf-8"))["files"]


def kind_of(relative: str, facts: FileFacts) -> str:
    """Return the kind of a file by the official list alone."""
    listed = official().get(relative)
    if listed is None:
        return OWN
    return OFFICIAL if listed["git_blob_sha1"] == facts.git_blob_sha1 else ALTERED


def decide_kind(declared: str, by_bytes: str) -> str:
    """Return the kind of a file whose bytes agree with its manifest: the declared one, unless the bytes alone decide."""
    return by_bytes if by_bytes == OFFICIAL or declared.strip().lower() in (OFFICIAL, OWN, ALTERED) else declared


@dataclass(frozen=True)
class Manifest:
    """Contents of the MANIFEST.json of a folder; empty if there is none."""

    files: Mapping[str, Mapping[str, Any]]  # relative path -> {"sha256", "instances", "kind"}

    @classmethod
    def beside(cls, root: Path) -> Manifest:
        """Read the manifest of a folder."""
        path = root / MANIFEST_FILE
        if not path.is_file():
            return cls({})
        try:
            content, reason = load(path), ""
        except Unreadable as error:
            content, reason = None, f": {error}"
        entries = content.get("files") if isinstance(content, dict) and content.get("schema") == 1 else None
        if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
            raise InvalidValue(f"{path} is not a manifest of schema 1{reason}; make one with anchorlora data import")
        for name, entry in entries.items():
            if not (name + entry["sha256"] + entry["kind"]).isprintable():
                raise InvalidValue(f"{path} holds line breaks or controls in what it says of {name!r:.80}; take them out")
        return cls(entries)

    def judge(self, relative: str, facts: FileFacts) -> FileFacts:
        """Return the facts of a file with its kind."""
        declared, kind = self.files.get(relative), kind_of(relative, facts)
        if declared is not None:
            if declared["sha256"] != facts.sha256:
                hashes = f"{MANIFEST_FILE} expects SHA-256 {declared['sha256']}, found {facts.sha256}"
                raise InvalidValue(f"{facts.path} is altered: {hashes}; fetch it again")
            return replace(facts, kind=decide_kind(declared["kind"], kind))
        if kind == ALTERED:
            expected = official()[relative]["git_blob_sha1"]
            raise InvalidValue(
                f"{facts.path} is not the official file: git blob SHA-1 {expected} expected, {facts.git_blob_sha1} found; "
                "fetch it again, or adopt it as it is with anchorlora data import"
            )
        return replace(facts, kind=kind)

    def verify(self, relative: str, facts: FileFacts) -> str:
        """Return the kind of a file, or "altered:" with what was expected and what is there."""
        declared, kind = self.files.get(relative), kind_of(relative, facts)
        if declared is not None and declared["sha256"] != facts.sha256:
            return f"{ALTERED}: expected SHA-256 {declared['sha256']}, found {facts.sha256}"
        if kind == ALTERED and (declared is None or declared["kind"] == OFFICIAL):
            return f"{ALTERED}: expected git blob {official()[relative]['git_blob_sha1']}, found {facts.git_blob_sha1}"
        return decide_kind(declared["kind"], kind) if declared else kind


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("kind"), str)
