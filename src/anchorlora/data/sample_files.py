"""Read rows of training text with their places: JSON Lines, JSON, CSV; Parquet and saved datasets through `datasets`."""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import islice, repeat
from pathlib import Path
from typing import Any

from anchorlora.data.forms import known_columns
from anchorlora.data.manifest import OWN, FileFacts, facts_of
from anchorlora.data.rows import iterate_samples, samples_of
from anchorlora.data.samples import Sample
from anchorlora.errors import InvalidValue, message_of
from anchorlora.paths import expanded, nearest
from anchorlora.store.json import DISTINCT, Unreadable

Rows = Iterator[tuple[str, Any]]
KINDS = ".jsonl, .json, .csv, .parquet, a folder that datasets' save_to_disk wrote, or ORG/NAME:SPLIT of the hub"
LARGEST_ROWS = 2**42  # bytes of a file of rows, which is never read whole
SAVED = ("dataset_dict.json", "state.json")  # what `datasets` leaves in a folder, of several splits or one
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
HUB = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*):([\w.-]+)")  # a file's name may hold a colon, but is found first


def read_samples(
    data: Path | str | Iterable[Mapping[str, Any]], *, column: str | None = None, limit: int | None = None
) -> list[Sample]:
    """Return the samples of a file or folder, or of rows in memory."""
    if isinstance(data, Mapping):
        raise InvalidValue(f"data has several parts ({', '.join(map(str, data))}); give the rows of one of them")
    if isinstance(data, (str, Path)):
        source, rows = str(data), rows_in(str(data))
    else:  # of `datasets`, or rows alone
        alone = map(_as_written, data, repeat(data.features)) if hasattr(data, "features") else data
        source, rows = "data", _number_rows("data", alone)
    return samples_of(islice(rows, limit), source=source, column=column)


def samples_in(source: str, *, column: str | None = None, mixed: bool = False) -> Iterator[Sample]:
    """Yield the samples of a file, a folder or a data set of the hub, one by one; of `mixed` rows each has a form of its own."""
    yield from iterate_samples(rows_in(source), source=source, column=column, mixed=mixed)


def facts_of_data(source: str) -> FileFacts:
    """Return the hashes of a file; of a folder or a data set of the hub, those of its rows."""
    path = expanded(source)
    if path.is_file():
        return facts_of(path, largest=LARGEST_ROWS)
    digest = hashlib.sha256()
    for _, row in rows_in(source):
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return FileFacts(path, digest.hexdigest(), "", OWN)


def lines_in(source: str) -> int | None:
    """Return how many lines a file of rows has, about as many as rows; None where it has no lines."""
    path = expanded(source)
    if not path.is_file() or path.suffix.lower() not in (".jsonl", ".ndjson", ".csv", ".tsv"):
        return None
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))


def rows_in(source: str) -> Rows:
    """Return the rows of a file, a folder or a data set of the hub as they stand, each with its place."""
    path = expanded(source)
    hub = None if path.exists() else HUB.fullmatch(source)
    if hub is not None:
        return _hub(*hub.groups())
    if path.is_dir():
        return _saved_dataset(path)
    if not path.is_file():
        missing = f"{path} is a device or a pipe" if path.exists() else f"there is no file {path}"
        raise InvalidValue(f"{missing}; data is {KINDS}{'' if path.exists() else nearest(path, files=True)}")
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv, ".tsv": _csv, ".json": _json, ".parquet": _parquet}
    if path.suffix.lower() not in readers:
        raise InvalidValue(f"{path} is not a kind of file that can be read; data is {KINDS}")
    return readers[path.suffix.lower()](path)


def _json_lines(path: Path) -> Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):  # by newlines alone: text may hold other line separators
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield f"{path}, line {number}", _parsed(f"{path}, line {number}", line.rstrip())


def _json(path: Path) -> Rows:
    """A list of rows; else one row a line, whatever the file is called; one object around them is refused."""
    content = path.read_bytes()
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        whole: Any = None
        with suppress(ValueError, RecursionError):  # several objects, or none
            whole = DISTINCT.decode(content.decode("utf-8-sig"))
        if isinstance(whole, dict) and (key := _around_rows(whole)) is not None:
            raise InvalidValue(f"{path}: one object around the rows, in {key!r:.40}; save that list of rows alone")
        if isinstance(whole, dict) and b"\n" in content.strip():
            raise InvalidValue(f"{path}: one object over several lines; give a list of such objects, or each on one line")
        return _json_lines(path)
    return _number_rows(str(path), _parsed(str(path), content))


def _around_rows(whole: Mapping[str, Any]) -> str | None:
    """The first key of an object that holds a list of rows, which are no turns of a chat."""
    if known_columns() & whole.keys():
        return None
    lists = ((key, value) for key, value in whole.items() if isinstance(value, list) and value)
    return next((k for k, v in lists if all(isinstance(row, dict) and not {"role", "from"} & row.keys() for row in v)), None)


def _parsed(location: str, content: bytes) -> Any:
    try:
        return DISTINCT.decode(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InvalidValue(f"{location}: not UTF-8; save the file as UTF-8") from None
    except Unreadable as error:
        raise InvalidValue(f"{location}: {error}, and one of them would be dropped; keep one") from None
    except json.JSONDecodeError as error:
        where = f", line {error.lineno}" if b"\n" in content.strip() else ""
        reason = f"not complete JSON{where}: {error.msg} at character {error.colno}"
    except ValueError:  # of the json module: a whole number with thousands of digits
        reason = "holds a number that is too long"
    except RecursionError:
        reason = "nested too deeply"
    raise InvalidValue(f"{location}: {reason}; give one JSON object per line")


def _csv(path: Path) -> Rows:
    """Rows of a file whose first line names the columns, separated by commas; or by semicolons or tabs, where it has no comma."""
    with path.open(
        encoding="utf-8-sig", errors="surrogateescape", newline=""
    ) as file:  # bytes that are not UTF-8 are refused with their row
        line = 0
        try:
            first = file.readline()
            if not first.isascii() and any("\udc80" <= character <= "\udcff" for character in first):
                raise InvalidValue(f"{path}, line 1: not UTF-8; save the file as UTF-8")
            columns = {mark: len(next(csv.reader([first], delimiter=mark), ())) for mark in SEPARATORS}
            mark = "," if columns[","] > 1 else max(columns, key=lambda separator: columns[separator])
            file.seek(0)
            reader = csv.DictReader(file, delimiter=mark, strict=True)
            reader.fieldnames = names = [str(name).strip() for name in reader.fieldnames or ()]
            line = reader.line_num
            twice = next((name for name in names if name and names.count(name) > 1), None)
            if twice is not None:
                raise InvalidValue(f"{path}, line 1: names column {twice!r:.40} twice, and one would be dropped; rename one")
            for row in reader:
                if None in row:
                    raise InvalidValue(
                        f"{path}, line {line + 1}: more fields than the {len(row) - 1} that the first line names; put text "
                        f"that holds a {SEPARATORS[mark]} into quotes, or save the rows as JSON Lines"
                    )
                yield f"{path}, line {line + 1}", {str(name): value for name, value in row.items()}
                line = reader.line_num
        except csv.Error as error:
            raise InvalidValue(f"{path}, line {line + 1}: not readable CSV: {error}; save the rows as JSON Lines") from None


def _parquet(path: Path) -> Rows:
    return _foreign(path, partial(_library(path).load_dataset, "parquet", data_files=str(path), split="train", streaming=True))


def _hub(name: str, split: str) -> Rows:
    opened = partial(_library(name).load_dataset, name, split=split, streaming=True)
    return _foreign(f"{name}:{split}", opened, remedy="check the name, the split and the network, or give a file")


def _saved_dataset(path: Path) -> Rows:
    if not any((path / name).is_file() for name in SAVED):
        files = sorted(file.name for file in path.iterdir() if file.suffix.lower() in KINDS.split(", "))
        there = f"; in it: {', '.join(files[:3])}" if files else ""
        raise InvalidValue(f"{path} is a folder that datasets did not save; data is {KINDS}{there}")
    datasets = _library(path)

    def opened() -> Any:
        data_set = datasets.load_from_disk(str(path))
        return data_set if isinstance(data_set, Mapping) else data_set.with_format(None)

    return _foreign(path, opened)


def _foreign(path: Path | str, opened: Any, *, remedy: str = f"data is {KINDS}") -> Rows:
    """Rows that another library reads; any exception of its own becomes one line."""
    number, rows = 0, None
    try:
        rows = opened()
        if not isinstance(rows, Mapping):
            for number, row in enumerate(rows, 1):
                yield f"{path}, row {number}", _as_written(row, rows.features)
            return
    except Exception as error:
        raise InvalidValue(f"{path}: not readable after row {number}: {message_of(error):.200}; {remedy}") from None
    raise InvalidValue(f"{path} holds several splits ({', '.join(rows)}); give one of them, as {path}/{next(iter(rows), 'train')}")


def _as_written(row: Any, features: Any) -> Any:
    """A row with the names of classes, and without the keys that Arrow adds to the objects of a list, one of which has them."""

    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: kept(inner) for name, inner in value.items() if inner is not None}
        return [kept(inner) for inner in value] if isinstance(value, list) else value

    if not isinstance(row, Mapping):
        return row
    classes = {name: feature.names for name, feature in (features or {}).items() if hasattr(feature, "int2str")}
    named = {name: classes[name][row[name]] for name in classes if row.get(name) in range(len(classes[name]))}  # -1: none
    return {name: kept(value) if isinstance(value, list) else value for name, value in row.items()} | named


def _library(path: Path | str) -> Any:
    if find_spec("datasets") is None:
        raise InvalidValue(
            f"{path} is read by datasets, which is not installed: pip install datasets, or save the rows as JSON Lines"
        )
    import datasets

    return datasets


def _number_rows(source: str, rows: Iterable[Any]) -> Rows:
    for number, row in enumerate(rows, 1):
        yield f"{source}, row {number}", row
