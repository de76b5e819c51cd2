"""Files that hold a hash of themselves, and folders that hold the hashes of their files.

A sealed file is JSON that holds its content as text, and the SHA-256 of it. A sealed folder has a file of hashes (`Seal`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from anchorlora.errors import InvalidValue
from anchorlora.store.json import FilePart, load, read_json

LARGEST_SEALED = 2**30  # bytes; answers of a whole task
AGAIN = "it is not what this program writes"
SEAL = "SEAL.json"
BEFORE = "before"  # name of the seal of the state that a folder continues from, among the files beside it
Kind = TypeVar("Kind")


class Seal(FilePart):
    """Hashes of a sealed folder."""

    files: dict[str, str]  # path in the folder -> SHA-256
    beside: dict[str, str]  # name of a file elsewhere that belongs to it -> SHA-256


def sealed(content: Any) -> str:
    """Return the text of a sealed file: the content with its hash."""
    text = json.dumps(content, allow_nan=False)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})


def read_sealed(path: Path, kind: type[Kind]) -> Kind:
    """Read what `sealed` made."""
    try:
        known = load(path, largest=LARGEST_SEALED)
        text = str(known["content"])
        wrong = "its hash differs" if hashlib.sha256(text.encode()).hexdigest() != known["sha256"] else None
    except FileNotFoundError:
        raise InvalidValue(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        raise InvalidValue(f"{path} is not what was written ({wrong})")
    return read_json(text, kind, where=str(path), remedy=AGAIN)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
