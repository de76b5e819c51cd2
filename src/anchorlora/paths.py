"""Paths as users write them, and which names a task, and so a folder, may have on every system."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from anchorlora.errors import InvalidValue

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LONGEST_PATTERN, MOST_TRIES = 1000, 10**6  # characters of a regular expression, and ways in which it may match a path
RESERVED = {"con", "prn", "aux", "nul"} | {f"{port}{i}" for port in ("com", "lpt") for i in range(10)}  # devices, on Windows

OF_FILE_MANAGERS = (".DS_Store", "Thumbs.db", "desktop.ini")  # what they leave in a folder that somebody looks into


def files_in(folder: Path, pattern: str = "**/*") -> list[Path]:
    """Return the files in a folder and below it, or those of a pattern, in order; what file managers leave is none of them."""
    return sorted(file for file in folder.glob(pattern) if file.is_file() and file.name not in OF_FILE_MANAGERS)


def is_name(text: str) -> bool:
    """Return True if text can be the name of a task, and so of a folder, on every system."""
    return bool(NAME.fullmatch(text)) and ".." not in text and text[-1] != "." and not is_reserved(text)


def is_reserved(text: str) -> bool:
    """Return True if Windows takes the name for a device, with or without a suffix."""
    return text.split(".")[0].lower() in RESERVED


def name_of_task(text: str) -> str:
    """Return the name of a task if it can be the name of a folder."""
    if not is_name(text):
        rule = "a letter or digit first, then letters, digits, '-', '_' and '.', 64 at most, and no name of a device"
        raise InvalidValue(f"{text!r:.90} cannot be the name of a task: {rule}")
    return text


def expanded(place: str | Path) -> Path:
    """Return a path in which a leading ~ is replaced by the home folder."""
    try:
        return Path(place).expanduser()
    except RuntimeError:
        raise InvalidValue(f"{str(place)!r:.90} begins with the home folder of an unknown user; write out the path") from None


def start_of(path: str | Path) -> str:
    """Return the end of an error message about a path that is not what it was: where relative ones begin, if it is one."""
    return "" if expanded(path).is_absolute() else f"; relative paths begin at the working folder, {Path.cwd()}"


def nearest(path: Path, *, files: bool = False) -> str:
    """Return the end of an error message: folders, or files too, with names like that of a missing one; empty if there are none."""
    parent = path.parent
    there = os.path.exists if files else os.path.isdir  # links that lead nowhere are not
    siblings = [p.name for p in parent.iterdir() if there(p) and p.name != path.name] if parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(str(parent / name) for name in near)}" if near else ""


def module_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression over paths of modules; refuse a stranger's that could search for longer than seconds."""
    plain = re.sub(r"\\.|\[[^]]*\]", "c", text)  # an escape or a class is one character
    plain = re.sub(r"([*+?}])\?", r"\1", plain.replace("(?:", "("))  # a lazy repetition costs what another does
    repeats, groups = len(re.findall(r"[*+{]", plain)), 1 + plain.count("(") + plain.count("?")
    choices = (1 + (plain.count("|") + plain.count("?")) / groups) ** groups  # at most, of all groups together
    strange = re.search(r"\)[*+{]|\(\?", plain) or re.search(r"\\[1-9]", text)
    if len(text) > LONGEST_PATTERN or strange or repeats > 4 or 40**repeats * choices > MOST_TRIES:
        raise InvalidValue(
            f"{text!r:.60} could take forever to search with; leave out repeated groups, look-arounds and back references, or list "
            "the modules by name"
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidValue(f"{text!r:.60} is not a regular expression: {error}") from None


def at_the_end(path: str, pattern: str) -> bool:
    """Return True if a pattern describes a path or the end of it, as PEFT reads the keys of `rank_pattern`."""
    module_pattern(pattern)
    return re.match(rf"(.*\.)?({pattern})$", path) is not None
