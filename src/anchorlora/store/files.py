"""Write whole files: under a temporary name first, then renamed, so that a file that exists is finished."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

from anchorlora.errors import InvalidValue
from anchorlora.store.json import DEEPEST, Unreadable, plain, text_of
from anchorlora.text import visible

# what a file system says that has no hard links, or flushes no folder
UNABLE = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
POSIX = hasattr(os, "O_DIRECTORY")  # Windows flushes no folder, and no file that is open for reading alone
LARGEST_YAML = 2**18  # bytes; a complete configuration has some two thousand


def write_text(path: Path, text: str) -> None:
    """Write a file whole: temporary name, flush to disk, rename. A device or a pipe is written to and not replaced."""
    if path.exists() and not path.is_file():
        with naming(path):
            path.write_text(text, encoding="utf-8", newline="\n")
        return
    with _written(path.with_name(f".{path.name}.tmp"), text, path) as temporary:
        temporary.replace(path)
    flush_entries(path.parent)


def write_first(path: Path, text: str) -> bool:
    """Write a file whole unless it exists, even if several processes try at once."""
    with _written(path.with_name(f".{path.name}.{os.getpid()}.tmp"), text, path) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in UNABLE or path.exists():
                raise
            temporary.rename(path)
    flush_entries(path.parent)
    return True


def link(path: Path, finished: Path) -> None:
    """Give a finished file another name, or copy it where the file system has no hard links."""
    try:
        os.link(finished, path)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
        shutil.copyfile(finished, path)


@contextmanager
def _written(temporary: Path, text: str, path: Path) -> Iterator[Path]:
    """A file that is removed at the end of the block, unless it has another name by then."""
    try:
        with naming(path), temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        if temporary.exists():  # on a read-only disk, nothing can be removed, not even what is not there
            temporary.unlink()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a file's name to a system error: a full disk names none, and a temporary name would tell the user nothing."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    except Exception as error:
        if refused := refused_in_words(error, path):
            raise refused from None
        raise


def refused_in_words(error: Exception, path: Path) -> OSError | None:  # as tokenizers and safetensors, in Rust, report it
    words = None if isinstance(error, OSError) else re.search(r"([^:]*) \(os error (\d+)\)", str(error))
    if words is None:
        return None
    return OSError(number := int(words[2]), words[1].strip(), str(path), number)  # which on Windows is one of its own


def write_lines(path: Path, rows: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> None:
    """Write JSON Lines whole."""
    write_text(path, "".join(visible(json.dumps(row, ensure_ascii=False, allow_nan=False)) + "\n" for row in rows))


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that gets its final name once the block has written it whole."""
    refuse_existing(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Refuse a file that exists already, or whose folder does not exist."""
    if path.exists():
        raise InvalidValue(f"{path} exists already and is not overwritten; give another name, or move it away")
    if not path.parent.is_dir():
        raise InvalidValue(f"there is no folder {path.parent} for {path.name}; make it first")


@contextmanager
def new_folder(path: Path, *, check: Callable[[], None] = lambda: None, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that gets its final name once the block has filled it; an older folder of that name is replaced.

    No process writes into another's; remains of killed ones are removed. Without `replace`, the first of several to end counts.
    """
    if replace:
        _remove_begun(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        flush(temporary)
        check()
        if replace:
            shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        _remove_begun(path)
        flush_entries(path.parent)
    except Exception as error:
        if refused := refused_in_words(error, path):
            raise refused from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_begun(path: Path) -> None:
    for begun in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        shutil.rmtree(begun, ignore_errors=True)


def flush(folder: Path) -> None:
    """Flush everything below a folder to disk, so that its name never stands for less than was written."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            flush_entries(path)
        else:
            flush_file(path)
    flush_entries(folder)


def flush_file(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb" if POSIX else "r+b") as file:
        os.fsync(file.fileno())


def flush_entries(folder: Path) -> None:
    """Flush the names in a folder to disk, where the system can."""
    if not POSIX:
        return
    entries = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entries)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
    finally:
        os.close(entries)


def dump_yaml(content: dict[str, Any]) -> str:
    """Return YAML 1.2 with the keys in the given order."""
    yaml, out = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(content, out)
    return out.getvalue()


def load_yaml(path: Path) -> Any:
    """Read YAML 1.2 as plain data: 1e-4 is a number and `on` is text."""
    try:
        return plain(deepcopy(_parsed(text_of(path, largest=LARGEST_YAML))))
    except FileNotFoundError:
        raise InvalidValue(f"there is no file {path}") from None
    except Unreadable as error:
        raise InvalidValue(f"{path} is not readable YAML: {error}") from None


@lru_cache(maxsize=8)
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
    except Exception as error:  # an impossible date, an alias inside itself: the library raises many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unreadable(f"{reason:.200}") from None
