"""Values and files that are read without guessing, whoever wrote them.  Imports nothing of ours.

Refused: unknown fields, a key given twice, NaN and infinities, numbers of more than 128 bits, text that is no Unicode, one part
in two places (a YAML alias), what is nested deeper than anything here, and files larger than anything here.

Files that are read back as every byte that was written.

A sealed file is JSON that holds its content as text, and the SHA-256 of it. A sealed folder has a file of hashes (`Seal`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from anchorlora.errors import InvalidValue

Read = TypeVar("Read")
LARGEST = 64 * 2**20  # bytes of a file that is read whole; data files may be larger
DEEPEST = 40  # parts within parts
INTEGER_BITS = 128  # tokenizers are saved with a length of 10^30 that stands for none
SIMPLE = (str, int, float, type(None))  # bool is an int


class Part(BaseModel):
    """What every stored shape shares; a field whose name in the file is a word of Python has an alias."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class Unreadable(InvalidValue):
    """Why a text or a file is not read, in words that follow its name."""


def bytes_of(path: Path, *, largest: int = LARGEST) -> bytes:
    """A whole file.  Raises FileNotFoundError, and Unreadable for what is no file or too large."""
    if path.exists() and not path.is_file():
        raise Unreadable("no regular file")
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise Unreadable(f"larger than {largest} bytes")
    return content


def text_of(path: Path, *, largest: int = LARGEST) -> str:
    """A UTF-8 file.  Raises as `bytes_of`, and Unreadable for what is no text."""
    try:
        return bytes_of(path, largest=largest).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8: {error}") from None


def loads(text: str) -> Any:
    """JSON, as the standard has it.  Raises Unreadable."""
    try:
        content = json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except Unreadable:
        raise
    except json.JSONDecodeError as error:
        raise Unreadable(f"not complete JSON: {error}") from None
    except ValueError:  # of the json module: a whole number with thousands of digits
        raise Unreadable("holds a number that is too long") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    return plain(content)


def load(path: Path, *, largest: int = LARGEST) -> Any:
    """A file of JSON.  Raises FileNotFoundError and Unreadable."""
    return loads(text_of(path, largest=largest))


def plain(content: Any) -> Any:
    """The content, if it is made of lists, objects, text, numbers and truth values alone.  Raises Unreadable."""
    seen: set[int] = set()
    level = [content]
    for _ in range(DEEPEST):
        level = [inner for part in level for inner in _within(part, seen)]
        if not level:
            return content
    raise Unreadable("nested too deeply")


def checked(content: Any, kind: type[Read], *, where: str, remedy: str) -> Read:
    """Content as a value of a type.  Raises ValueError that names the place, the field and the remedy."""
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidValue(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {remedy}") from None


def read_json(text: str, kind: type[Read], *, where: str, remedy: str) -> Read:
    """One JSON text as a checked value.  Raises ValueError that names the place, the field and the remedy."""
    try:
        content = loads(text)
    except Unreadable as error:
        raise InvalidValue(f"{where}: {error}; {remedy}") from None
    return checked(content, kind, where=where, remedy=remedy)


def read_file(path: Path, kind: type[Read], *, remedy: str, largest: int = LARGEST) -> Read:
    """A file of JSON as a checked value.  Raises FileNotFoundError, and ValueError as `read_json` does."""
    try:
        text = text_of(path, largest=largest)
    except Unreadable as error:
        raise InvalidValue(f"{path}: {error}; {remedy}") from None
    return read_json(text, kind, where=str(path), remedy=remedy)


def converting(pickled: Path, to: Path) -> str:
    """The command that turns a pickle of tensors into safetensors, for somebody who trusts the file."""
    load = f"torch.load({str(pickled)!r}, map_location='cpu', weights_only=True)"
    return (
        'python -c "import torch, safetensors.torch as s; '
        f's.save_file({{k: v.clone().contiguous() for k, v in {load}.items()}}, {str(to)!r})"'
    )


def _refuse(name: str) -> Any:
    raise Unreadable(f"holds {name}, which is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unreadable(f"holds {twice!r:.60} twice")
    return out


def _within(part: Any, seen: set[int]) -> Iterator[Any]:
    """What is directly inside a part, after a look at the part itself."""
    if isinstance(part, (dict, list)):
        if id(part) in seen:
            raise Unreadable("holds one part in two places; write it out")
        seen.add(id(part))
        yield from _members(part)
    elif not isinstance(part, SIMPLE):
        raise Unreadable(f"holds a {type(part).__name__}, which is neither text nor a number")
    elif isinstance(part, str):
        _refuse_surrogates(part)
    elif isinstance(part, float) and not math.isfinite(part):
        raise Unreadable(f"holds {part}, which is no number")
    elif isinstance(part, int) and part.bit_length() > INTEGER_BITS:
        raise Unreadable("holds a number that is too long")


def _members(part: dict | list) -> Iterable[Any]:
    if isinstance(part, list):
        return part
    for name in part:
        if not isinstance(name, str):
            raise Unreadable(f"holds the key {name!r:.60}, which is no text")
        _refuse_surrogates(name)
    return part.values()


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unreadable("holds characters that are no Unicode text") from None


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
        raise InvalidValue(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        raise InvalidValue(f"{path} is not what was written ({wrong})")
    return read_json(text, kind, where=str(path), remedy=AGAIN)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
