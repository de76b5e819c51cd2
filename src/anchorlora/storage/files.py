"""Writing whole files: under another name first, then renamed, so that what exists is finished."""

from __future__ import annotations

import errno
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

from anchorlora.errors import InvalidValue
from anchorlora.schemas.json import DEEPEST, Unreadable, plain, text_of
from anchorlora.schemas.text import visible

WITHOUT_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # what a file system without hard links says
LARGEST_YAML = 2**18  # bytes; a complete configuration has some two thousand


def write_text(path: Path, text: str) -> None:
    """Write `path` whole: temporary name, flush to disk, rename."""
    with _written(path.with_name(f".{path.name}.tmp"), text) as temporary:
        temporary.rename(path)
    flush_entries(path.parent)


def write_first(path: Path, text: str) -> bool:
    """Write `path` whole if it is not there, whoever else is writing it now; returns whether it is this text that is there."""
    with _written(path.with_name(f".{path.name}.{os.getpid()}.tmp"), text) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in WITHOUT_LINKS or path.exists():
                raise
            temporary.rename(path)
    flush_entries(path.parent)
    return True


@contextmanager
def _written(temporary: Path, text: str) -> Iterator[Path]:
    """A file on disk that is there for the block alone, unless it gets another name."""
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def write_lines(path: Path, rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> None:
    write_text(path, "".join(visible(json.dumps(row, ensure_ascii=False, allow_nan=False)) + "\n" for row in rows))


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file that appears under its name only when the block has written it whole.  Raises ValueError where one is already."""
    refuse_existing(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Raises ValueError for a file that is there already, or whose folder is missing."""
    if path.exists():
        raise InvalidValue(f"{path} exists already and is not overwritten; give another name, or move it away")
    if not path.parent.is_dir():
        raise InvalidValue(f"there is no folder {path.parent} for {path.name}; make it first")


@contextmanager
def new_folder(path: Path, *, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A folder that appears under its name only when the block has filled it; an older one of that name is replaced.

    check: called before it appears; raises where it must not. The temporary name is no other process's, so that one that was
    suspended meanwhile writes into nobody's folder; what a killed one left under such a name goes.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        flush(temporary)
        check()
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        flush_entries(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def flush(folder: Path) -> None:
    """Everything below a folder on disk, so that its name never stands for less than was written."""
    for place in sorted(folder.rglob("*")):
        if place.is_dir():
            flush_entries(place)
        else:
            with place.open("rb") as file:
                os.fsync(file.fileno())
    flush_entries(folder)


def flush_entries(folder: Path) -> None:
    """The names in a folder on disk."""
    entries = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entries)
    finally:
        os.close(entries)


def dump_yaml(content: dict[str, Any]) -> str:
    """YAML 1.2, keys in the given order."""
    yaml, out = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(content, out)
    return out.getvalue()


def load_yaml(path: Path) -> Any:
    """YAML 1.2 as plain data: 1e-4 is a number, `on` is text; a key given twice, tags and aliases are refused."""
    try:
        return plain(_parsed(text_of(path, largest=LARGEST_YAML)))
    except FileNotFoundError:
        raise InvalidValue(f"there is no file {path}") from None
    except Unreadable as error:
        raise InvalidValue(f"{path} is not readable YAML: {error}") from None


def _parsed(text: str) -> Any:
    try:
        depth = 0
        for event in YAML(typ="safe", pure=True).parse(text):  # first, for the time of the library grows as the depth's square
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > DEEPEST:
                raise Unreadable("nested too deeply")
        return YAML(typ="safe", pure=True).load(text)
    except Unreadable:
        raise
    except Exception as error:  # of a date that is none, an alias within itself: the library raises what it likes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unreadable(f"{reason:.200}") from None
