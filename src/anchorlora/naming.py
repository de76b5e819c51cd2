"""What may be the name of a task, and so of a folder, on every system; and a path as somebody wrote it."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = {"con", "prn", "aux", "nul"} | {f"{port}{i}" for port in ("com", "lpt") for i in range(10)}  # devices, on Windows


def is_name(text: str) -> bool:
    return bool(NAME.fullmatch(text)) and ".." not in text and text[-1] != "." and not is_reserved(text)


def is_reserved(text: str) -> bool:
    """Whether Windows takes it for a device, with or without a suffix."""
    return text.split(".")[0].lower() in RESERVED


def name_of_task(text: str) -> str:
    """The name itself.  Raises ValueError for one that could be no folder."""
    if not is_name(text):
        rule = "a letter or digit first, then letters, digits, '-', '_' and '.', 64 at most, and no name of a device"
        raise ValueError(f"{text!r:.90} cannot be the name of a task: {rule}")
    return text


def expanded(place: str | Path) -> Path:
    """A path in which ~ may be a home folder.  Raises ValueError where ~ stands for the home of nobody here."""
    try:
        return Path(place).expanduser()
    except RuntimeError:
        raise ValueError(f"{str(place)!r:.90} begins with the home folder of nobody here; write the path out") from None
