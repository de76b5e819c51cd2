"""Make other people's text fit to be shown: nothing in it controls a terminal or reverses a line, and it holds no secret.

Also which names a task, and so a folder, may have on every system, and paths as users write them.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from anchorlora.errors import InvalidValue

# controls but line breaks and tabs, marks of direction, other line separators, halves of characters
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
# a word begins here, also after an escape as repr writes it
START = r"(?:\b|(?<=\\[nrtfv])|(?<=\\x[0-9a-f]{2})|(?<=\\u[0-9a-f]{4}))"
SECRETS = (
    (re.compile(r"(?:(?<=://)|(?<=\w\w:/))[^/\s]*@"), ""),  # who and which password, in an address; a path has one slash of it
    (re.compile(r"(?<![\w/.:@-])[\w.+-]+:[^\s/:@]+@(?=[\w.-]+/)"), ""),  # the same before a name of the hub
    (re.compile(START + r"hf_[A-Za-z0-9]{8,}"), "hf_..."),
    (re.compile(START + r"(bearer)\s+[\w.~+/=-]{8,}", re.IGNORECASE), r"\1 ..."),
)
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")  # in the environment, whatever they look like
LEAST = 8  # characters of a token; shorter ones occur by chance


def visible(text: str) -> str:
    r"""Return text with control characters written out, as in \u001b; JSON stays the same JSON."""
    return STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def without_secrets(text: str) -> str:
    """Return text without passwords in addresses, and without tokens of the hub and of headers."""
    for name in TOKENS:
        token = os.environ.get(name, "")
        text = text.replace(token, "...") if len(token) >= LEAST else text
    for secret, instead in SECRETS:
        text = secret.sub(instead, text)
    return text


def shown(text: str) -> str:
    """Return text fit for a terminal and a log: visible, and without secrets."""
    return visible(without_secrets(text))


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = {"con", "prn", "aux", "nul"} | {f"{port}{i}" for port in ("com", "lpt") for i in range(10)}  # devices, on Windows


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


def nearest_folders(path: Path) -> str:
    """Return the end of an error message: folders with names like that of a missing one; empty if there are none."""
    parent = path.parent
    siblings = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    near = get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(str(parent / name) for name in near)}" if near else ""
