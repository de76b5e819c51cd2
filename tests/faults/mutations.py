"""Damage of a file's bytes, and of the JSON that it holds."""

from __future__ import annotations

import copy
import json
import random

ODD = [None, True, -1, 0, 2**70, 10**400, 1e308, -0.0, "", "\x00", "\ud800", "../../x", "/etc/passwd", "\x1b]0;x\x07", "é" * 300]
ODD += [[], {}, [[]], {"": None}, "=HYPERLINK(1)", "<script>", float("nan"), float("inf"), "CON", ".", "a/b", "x" * 5000]
CHUNKS = [
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"{" * 50,
    b"[" * 5000,
    b"NaN",
    b"1e999",
    b"-",
    b'"',
    b"9" * 5000,
    b"\n",
    b"\r",
    b":",
]
CHUNKS += [
    b'\\ud800"',
    b"&a ",
    b"*a",
    b"!!python/name:os.system ",
    b"<<: ",
    b"? ",
    b"2001-99-99",
    b"%YAML 9.9\n---\n",
    b"\xe2\x80\xa8",
]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The bytes with a few of them cut, doubled, flipped, or replaced by what readers stumble over."""
    out = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(out) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            del out[at:]
        elif kind == 1:
            out[at:at] = draw.choice(CHUNKS)
        elif kind == 2 and out:
            out[min(at, len(out) - 1)] = draw.randrange(256)
        elif kind == 3:
            del out[at : at + draw.randrange(1, 40)]
        else:
            out[at:at] = out[at : at + draw.randrange(1, 200)]
    return bytes(out)


def altered(content: object, draw: random.Random) -> object:
    """The content with some of its parts of another type, gone, doubled, renamed, or nested."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not isinstance(content, (dict, list)) or not content or draw.random() < 0.02:
            return draw.choice(ODD)
        place = content
        while True:
            key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.2:
                break
            place = inner
        _change(place, key, draw)
    return content


def _change(place, key, draw: random.Random) -> None:
    kind = draw.randrange(5)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[draw.choice(["", "x", "../y", "\x00", "schema"])] = place.pop(key)
    elif kind == 2 and isinstance(place[key], list) and place[key]:
        place[key] = place[key] * 2
    elif kind == 3:
        place[key] = nested(draw.choice((5, 45, 200)), draw)
    else:
        place[key] = copy.deepcopy(draw.choice(ODD))


def nested(depth: int, draw: random.Random) -> object:
    out: object = draw.choice(ODD[:10])
    for _ in range(depth):
        out = [out] if draw.random() < 0.5 else {"a": out}
    return out


def mutated(content: bytes, draw: random.Random, *, form: str) -> bytes:
    """Damage of a file; form: "json", "jsonl", or "bytes" for what has no parts that could be altered."""
    if form == "bytes" or draw.random() < 0.4:
        return damaged(content, draw)
    if form == "jsonl":
        lines = content.split(b"\n")
        at = draw.randrange(len(lines))
        lines[at] = _dumped(altered(json.loads(lines[at] or b"{}"), draw))
        return b"\n".join(lines)
    return _dumped(altered(json.loads(content), draw))


def _dumped(content: object) -> bytes:
    return json.dumps(content).encode()
