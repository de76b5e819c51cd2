"""Make text fit to be shown or to name a file: that of others controls no terminal, reverses no line, and holds no secret."""

from __future__ import annotations

import os
import re
from hashlib import sha256

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


def amount(number: float, one: str, many: str | None = None) -> str:
    """Return a number of things in words, such as `1 row` and `2 rows`; `many` is for words that take no s."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{digits} {one if digits == '1' else many or f'{one}s'}"


def file_name(text: str) -> str:
    """Return a text as a file name: all but letters, digits, ".", "_", "-" become hyphens; what is cut to 120 ends in a hash."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    return name if len(name) <= 120 else f"{name[:107]}-{sha256(name.encode()).hexdigest()[:12]}"
