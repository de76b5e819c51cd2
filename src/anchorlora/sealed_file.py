"""Files that are read back as every byte that was written.

A sealed file is JSON that holds its content as text, and the SHA-256 of it. A sealed folder has a file of hashes (`Seal`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from anchorlora.strict import Part, load, read_json

LARGEST_SEALED = 2**30  # bytes; answers of a whole task
AGAIN = "it is not what this program writes"
SEAL = "SEAL.json"
BEFORE = "before"  # the name of the seal of the state that a folder goes on from, among the files beside it
Kind = TypeVar("Kind")


class Seal(Part):
    """SHA-256 of the folder's files, and of files elsewhere that belong to it, by name."""

    files: dict[str, str]
    beside: dict[str, str]


def sealed(content: Any) -> str:
    """The text of such a file."""
    text = json.dumps(content, allow_nan=False)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})


def read_sealed(path: Path, kind: type[Kind]) -> Kind:
    """What `sealed` made, checked.  Raises ValueError that names the file."""
    try:
        known = load(path, largest=LARGEST_SEALED)
        text = str(known["content"])
        wrong = "its hash differs" if hashlib.sha256(text.encode()).hexdigest() != known["sha256"] else None
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        raise ValueError(f"{path} is not what was written ({wrong})")
    return read_json(text, kind, where=str(path), remedy=AGAIN)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
