"""Refuse, by its name, a part of a chat that the chat template drops: other words in its place give the same rendering."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from anchorlora.data.templates import ANSWERED, Messages, attempt
from anchorlora.data.thoughts import THOUGHTS
from anchorlora.errors import InvalidValue

Write = Callable[..., str]  # what a chat template writes of messages, see `render`
PLUMBING = frozenset({"id", "tool_call_id", "type", "index"})  # that tie calls to results, and hold no words


def refuse_dropped(
    location: str,
    messages: Messages,
    text: str,
    write: Write,
    tools: Sequence[Mapping[str, Any]],
    *,
    whole: str,  # what the template writes
    asked: str | None = None,  # and of all but the last message, as a prompt
    learned: Collection[int] = (),
) -> None:
    """Refuse a chat of which the rendering lacks a message, a key of one, or the tools; `learned` are answers themselves."""

    def same(*changed: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = tools) -> bool:
        """Return whether the template writes other messages as it writes these."""
        if attempt(write, changed, tools=tools) != whole:
            return False
        return asked is None or attempt(write, changed[:-1], tools=tools, asking=True) == asked

    before = max(learned, default=0)

    @cache
    def as_before() -> bool:
        """Return whether the messages before the last earlier answer are written as they were there, where they were checked."""
        beginnings = (attempt(write, messages[:before], tools=tools, asking=asking) for asking in (True, False))
        return any(beginning is not None and whole.startswith(beginning) for beginning in beginnings)

    def unread(number: int, words: str, gone: Sequence[re.Match[str]]) -> list[str]:
        """Words of a message in whose place the template writes no others, either; it reads the rest, as a flag."""
        marks, changed = [f"{ANSWERED}{i}mark" for i in range(len(gone))], words
        for match, mark in zip(reversed(gone), reversed(marks), strict=True):
            changed = f"{changed[: match.start()]}{mark}{changed[match.end() :]}"
        chat = [*messages[: number - 1], {**messages[number - 1], "content": changed}, *messages[number:]]
        other = attempt(write, chat, tools=tools) or ""
        return [match[0] for match, mark in zip(gone, marks, strict=True) if mark not in other]

    position = 0
    for number, message in enumerate(messages, 1):
        role, last = message["role"], number == len(messages)
        position = len(asked) if last and asked is not None else position
        words = every = str(message["content"]).strip()
        if role == "assistant":  # templates drop the thoughts of earlier turns, and write the last one's in their own way
            words = re.sub(r"\A\s*<([\w:]+)>.*?</\1>\s*", "", words, flags=re.DOTALL)
            every = re.sub(r"</?[\w:]+>", " ", every)
        at, length = _find(words, text, position)
        if (at < 0 and number - 1 not in learned) or (role not in ("user", "assistant") and not (number <= before and as_before())):
            other = {**message, "content": f"{ANSWERED} {words}"}
            if same(*messages[: number - 1], other, *messages[number:]):
                raise InvalidValue(
                    f"{location}: the tokenizer's chat template does not write message {number} (role {role!r}); "
                    "change its role, or take it out"
                )
        if last or role != "assistant":
            missing = _missing(every, text, position if role == "assistant" else 0)
            gone = [match[0] for match in missing] if role == "assistant" or not missing else unread(number, every, missing)
            if gone:
                raise InvalidValue(
                    f"{location}: the tokenizer's chat template leaves out {gone[0]!r:.40} of message {number} (role {role!r}); "
                    "take it out, or give the rendered text as prompt and completion"
                )
        position = max(position, at + length)
        if number - 1 in learned:
            continue  # its keys are learned where it is the answer
        for key, value in message.items():
            if key in ("role", "content") or value in (None, "", [], {}, ()) or key in PLUMBING:
                continue
            if key in THOUGHTS and not last:
                continue
            without = {name: inner for name, inner in message.items() if name != key}
            lost = key not in THOUGHTS and _find_lost(value, text) is not None
            named = role == "tool" and key == "name"  # the function's, which its call says, too
            if lost or (
                not named and not (number <= before and as_before()) and same(*messages[: number - 1], without, *messages[number:])
            ):
                if key in THOUGHTS and str(value).strip() in text and text != whole:
                    continue  # written into the thought that the template opens
                remedy = "take it out, or give the rendered text as prompt and completion"
                if isinstance(value, (bool, float, int)):  # a mark, as trainers have them
                    remedy = 'if it says that the message is not learned, write "train": false in its place, else take it out'
                raise InvalidValue(
                    f"{location}: key {key!r} of message {number} (role {role!r}) would not be learned: the tokenizer's chat "
                    f"template does not write it; {remedy}"
                )
    if tools and same(*messages, tools=()):
        raise InvalidValue(
            f"{location}: tools would not be learned: the tokenizer's chat template does not write them; take them out, or give "
            "the rendered text as prompt and completion"
        )


def _missing(words: str, text: str, position: int) -> list[re.Match[str]]:
    """The words that a text does not hold, in their order, from a place on."""
    gone: list[re.Match[str]] = []
    if _find(words.strip(), text, position)[0] >= 0:
        return gone
    for word in re.finditer(r"\S+", words):
        at, length = _find(word[0], text, position)
        if at < 0:
            gone.append(word)
        position = max(position, at + length)
    return gone


def _find(words: str, text: str, position: int) -> tuple[int, int]:
    """Where words stand in a text from a place on, as they are or as JSON writes them, and how long they are there."""
    for form in (words, json.dumps(words)[1:-1], json.dumps(words, ensure_ascii=False)[1:-1]):
        at = text.find(form, position)
        if at >= 0:
            return at, len(form)
    return -1, 0


def _find_lost(value: Any, text: str) -> str | None:
    """The first words or numbers of a value that a text does not hold; None where it holds them all."""
    for leaf in _leaves(value):
        if leaf.strip() and _find(leaf.strip(), text, 0)[0] < 0:
            try:
                inner = json.loads(leaf)  # arguments are often JSON text, which templates write anew
            except ValueError:
                return leaf
            if not isinstance(inner, (dict, list)) or _find_lost(inner, text) is not None:
                return leaf
    return None


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in PLUMBING:
                yield from _leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, bool) or value is None:
        return
    else:
        yield str(value)
