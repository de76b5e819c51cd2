"""Read values and files without guessing, whoever wrote them.  Imports nothing of ours.

Refused: unknown fields, repeated keys, NaN and infinities, numbers of more than 128 bits, text that is not Unicode, one part in two
places (a YAML alias), deep nesting, and very large files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from anchorlora.errors import InvalidValue

Read = TypeVar("Read")
LARGEST = 64 * 2**20  # bytes of a file that is read whole; data files may be larger
DEEPEST = 40  # parts within parts
INTEGER_BITS = 128  # tokenizers are saved with a length of 10^30 that stands for none


class FilePart(BaseModel):
    """Base of every stored shape.  A field whose name in the file is a Python keyword or attribute has an alias."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def as_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.model_dump(by_alias=True), indent=1, allow_nan=False) + "\n"


class Unreadable(InvalidValue):
    """Reason why a text or a file is not read, in words that follow its name."""


def bytes_of(path: Path, *, largest: int = LARGEST) -> bytes:
    """Return the bytes of a whole file."""
    if path.exists() and not path.is_file():
        raise Unreadable("not a regular file")
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise Unreadable(f"larger than {largest} bytes")
    return content


def text_of(path: Path, *, largest: int = LARGEST) -> str:
    """Return the text of a UTF-8 file."""
    try:
        return bytes_of(path, largest=largest).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8: {error}") from None


def loads(text: str) -> Any:
    """Parse JSON, strictly by the standard."""
    try:
        content = STRICT.decode(text)
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
    """Read a file of JSON."""
    return loads(text_of(path, largest=largest))


def plain(content: Any) -> Any:
    """Return the content if it consists of lists, objects, text, numbers, truth values and null alone."""
    seen: set[int] = set()
    level: list[Any] = [content]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for part in level:
            if isinstance(part, str):
                _refuse_surrogates(part)
            elif isinstance(part, (dict, list)):
                if id(part) in seen:
                    raise Unreadable("holds one part in two places (an alias); write it out twice")
                seen.add(id(part))
                below += part if isinstance(part, list) else _values(part)
            elif isinstance(part, float):
                if not math.isfinite(part):
                    raise Unreadable(f"holds {part}, which is not a number")
            elif isinstance(part, int):
                if part.bit_length() > INTEGER_BITS:
                    raise Unreadable("holds a number that is too long")
            elif part is not None:
                raise Unreadable(f"holds a {type(part).__name__}, which is neither text nor a number")
        if not below:
            return content
        level = below
    raise Unreadable("nested too deeply")


def checked(content: Any, kind: type[Read], *, where: str, remedy: str) -> Read:
    """Return content as a value of a type."""
    try:
        value: Read = _adapter(kind).validate_python(content)  # type: ignore[arg-type]  # a type is hashable
        return value
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidValue(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {remedy}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Making one takes longer than reading a line with it."""
    return TypeAdapter(kind)


def read_json(text: str, kind: type[Read], *, where: str, remedy: str) -> Read:
    """Return a JSON text as a value of a type."""
    try:
        content = loads(text)
    except Unreadable as error:
        raise InvalidValue(f"{where}: {error}; {remedy}") from None
    return checked(content, kind, where=where, remedy=remedy)


def read_file(path: Path, kind: type[Read], *, remedy: str, largest: int = LARGEST) -> Read:
    """Return a file of JSON as a value of a type."""
    try:
        text = text_of(path, largest=largest)
    except Unreadable as error:
        raise InvalidValue(f"{path}: {error}; {remedy}") from None
    return read_json(text, kind, where=str(path), remedy=remedy)


def converting(pickled: Path, to: Path) -> str:
    """Return the command that converts a pickle of tensors to safetensors, for someone who trusts the file."""
    load = f"torch.load({str(pickled)!r}, map_location='cpu', weights_only=True)"
    return (
        'python -c "import torch, safetensors.torch as s; '
        f's.save_file({{k: v.clone().contiguous() for k, v in {load}.items()}}, {str(to)!r})"'
    )


def _refuse(name: str) -> Any:
    raise Unreadable(f"holds {name}, which is not a number")


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of an object, of which no two have one key."""
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unreadable(f"holds {twice!r:.60} twice")
    return out


DISTINCT = json.JSONDecoder(object_pairs_hook=distinct)
STRICT = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=distinct)  # making one takes longer than a line


def _values(part: dict[Any, Any]) -> Iterable[Any]:
    for name in part:
        if not isinstance(name, str):
            raise Unreadable(f"holds the key {name!r:.60}, which is not text")
        _refuse_surrogates(name)
    return part.values()


def _refuse_surrogates(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Unreadable("holds characters that are not Unicode text") from None
