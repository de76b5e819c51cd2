"""A form of rows, and a row whose columns are read with all that they must not hold refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from anchorlora.data.samples import Message, Sample, is_unicode
from anchorlora.errors import InvalidValue
from anchorlora.store.json import DISTINCT, Unreadable

WORDS = {str: "text", list: "a list of messages", dict: "an object", bool: "a truth value", type(None): "nothing"}
# who speaks in ShareGPT's turns -> role
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatbot", "chatgpt", "ai", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "tool"), "tool"),
    "system": "system",
}
CALLING = ("function_call", "tool_call")  # speakers whose text is a call, as JSON
CHAT = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content|from|value)\1\s*:.*\}\s*\]\s*\Z""", re.DOTALL)  # written as JSON or Python
MARKS = ("weight", "train")  # of a row or a message: whether it is learned


@dataclass(frozen=True)
class Form:
    """A form in which people keep rows: by which columns it is known, and what is learned of it."""

    name: str
    columns: tuple[str, ...]  # those that every row has
    about: str  # what is learned, for the table of forms
    read: Callable[[Row], Sample] | None = None
    optional: tuple[str, ...] = ()  # columns that are read where they are there
    refuses: str = ""  # why its rows cannot be learned, with the remedy; "" where they can
    holds: Callable[[Mapping[str, Any]], bool] = lambda columns: True  # what a row must hold beside having the columns
    even_named: bool = False  # refuses its rows also where the user names the columns to read

    def fits(self, columns: Mapping[str, Any]) -> bool:
        """Tell whether a row is of this form; a column that holds null counts as absent."""
        return all(columns.get(name) is not None for name in self.columns) and self.holds(columns)

    @property
    def known(self) -> frozenset[str]:
        """Every column that is read."""
        return frozenset((*self.columns, *self.optional))


@dataclass(frozen=True)
class Row:
    """A row of a file, with its place for messages."""

    place: str
    columns: Mapping[str, Any]

    def refusal(self, reason: str) -> InvalidValue:
        """Return the refusal of the row, for a reason."""
        return InvalidValue(f"{self.place}: {reason}")

    def has(self, name: str) -> bool:
        """Tell whether a column holds anything."""
        return self.columns.get(name) not in (None, "", [], {}, ())

    def text(self, name: str) -> str:
        """Return the text of a column; nothing is empty text."""
        return str(self.value(name, str)) if self.has(name) else ""

    def content(self, name: str) -> str | tuple[Message, ...]:
        """Return the text or the messages of a column."""
        value = self.value(name, str, list)
        return value if isinstance(value, str) else messages_of(self.place, name, value)

    def messages(self, name: str) -> tuple[Message, ...]:
        """Return the messages of a column."""
        return messages_of(self.place, name, self.value(name, list))

    def value(self, name: str, *kinds: type) -> Any:
        """Return what a column holds, of one of some kinds."""
        value = self.columns.get(name)
        if value is None and name in self.columns:
            raise self.refusal(f"column {name!r} holds nothing; fill it, or take the row out")
        if value is None:
            raise self.refusal(f"no column {name!r}, which the first row has; give every row the same columns")
        if not isinstance(value, kinds):
            wanted = " or ".join(WORDS[kind] for kind in kinds)
            quoted = "; put it in quotes" if str in kinds and isinstance(value, (int, float)) else ""
            quoted = "; save the rows as JSON Lines, with a list there" if isinstance(value, str) else quoted
            raise self.refusal(f"{name} must be {wanted}, not {kind_of(value)}{quoted}")
        if not all(map(is_unicode, _texts(value))):
            raise self.refusal(f"{name} holds characters that are not Unicode text; save the file as UTF-8")
        return value

    def plain(self, text: str, *, given: int = 0) -> Sample:
        """Return a sample of text, of which the prompt is given."""
        if self.has("tools"):
            raise self.refusal("column tools would not be learned; give the row as messages, or take the column out")
        return Sample(self.place, text, given=given)

    def chat(self, messages: Sequence[Message], *, given: int = 0, continued: int = 0) -> Sample:
        """Return a sample of messages, without the marks of those that are not learned."""
        muted = set[int]()
        for i, message in enumerate(messages):
            where = f"message {i + 1} (role {message['role']!r})"
            for arguments in _arguments(message.get("tool_calls")):
                with suppress(json.JSONDecodeError, RecursionError):  # words that are no object stand as they are
                    _read(self.place, f"a call of {where}", arguments)
            if not is_learned(self.place, message, of=f" of {where}"):
                muted.add(i)
            elif message.get("train") is True and message["role"] != "assistant":
                raise self.refusal(f"train is true of {where}, and only the assistant's are learned; take the key out")
        plain = tuple({key: value for key, value in message.items() if key not in MARKS} for message in messages)
        return Sample(self.place, plain, given=given, tools=self.tools(), continued=continued, muted=frozenset(muted))

    def joined(self, *names: str) -> Sample:
        """Return what columns hold one after the other; nothing of it is given."""
        parts = self.alike(*names)
        return self.chat([m for part in parts for m in part]) if isinstance(parts[0], tuple) else self.plain("".join(parts))

    def alike(self, *names: str) -> list[Any]:
        """Return the contents of columns, which are all text or all messages."""
        self.refuse_written(*names)
        parts = [self.content(name) for name in names]
        if len({type(part) for part in parts}) > 1:
            raise self.refusal(f"{' and '.join(names)} must all be text or all be lists of messages")
        return parts

    def refuse_written(self, *names: str) -> None:
        """Refuse columns that all hold a list of messages as text, whose brackets and quotes would be learned."""
        if all(isinstance(text := self.columns.get(name), str) and CHAT.match(text) for name in names):
            what = f"{' and '.join(names)} {'holds a list' if len(names) == 1 else 'hold lists'} of messages as text"
            raise self.refusal(f"{what}; save the rows as JSON Lines, with a list there")

    def tools(self) -> tuple[Message, ...]:
        """Return the functions that a chat may call, which data sets keep as objects or as JSON text."""
        tools = self.columns["tools"] if self.has("tools") else ()
        if isinstance(tools, str):
            try:
                tools = _read(self.place, "tools", tools)
            except json.JSONDecodeError:
                raise self.refusal("tools must be a list of objects, or such a list as JSON text") from None
        if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
            raise self.refusal(f"tools must be a list of objects, not {kind_of(tools)}")
        if not all(map(is_unicode, _texts(tools))):
            raise self.refusal("tools holds characters that are not Unicode text; save the file as UTF-8")
        return tuple(tools)


def is_learned(location: str, marks: Mapping[str, Any], *, of: str = "") -> bool:
    """Tell whether a row or a message is learned: not with weight 0 or with train false."""
    train, weight = marks.get("train"), marks.get("weight")
    truth = {"true": True, "false": False, "none": True, "": True}.get(str(train).strip().lower())
    if truth is None:
        raise InvalidValue(f"{location}: train{of} must be true or false, not {train!s:.40}")
    share = 1.0 if weight in (None, "") else number_of(weight)
    if share not in (0, 1):
        raise InvalidValue(f"{location}: weight{of} is {weight!s:.20}; text is learned (1) or not (0); take the weight out")
    return truth and share == 1


def number_of(value: Any) -> float | None:
    """Return a number, also one that is written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def messages_of(location: str, name: str, turns: list[Any]) -> tuple[Message, ...]:
    """Return messages of a list of turns, which may be in ShareGPT's words (from, value)."""
    if not turns:
        raise InvalidValue(f"{location}: {name} is an empty list; take the row out")
    return tuple(_message(location, f"message {i} of {name}", turn) for i, turn in enumerate(turns, 1))


def _message(location: str, where: str, turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise InvalidValue(f"{location}: {where} must be an object with role and content, not {kind_of(turn)}")
    if turn.get("role") is None and turn.get("from") is not None:
        return _of_speaker(location, where, turn)
    content = turn.get("content")
    if isinstance(content, (list, tuple)):  # parts, as for models that see
        kinds = [part.get("type") if isinstance(part, Mapping) else kind_of(part) for part in content]
        if kinds != ["text"] or not isinstance(content[0].get("text"), str):
            parts = ", ".join(f"{kind!s:.20}" for kind in kinds[:5])
            raise InvalidValue(
                f"{location}: content of {where} must be text, not a list ({parts}); one part of type text is read as its text: "
                "join several to one, and leave out rows with others, such as images"
            )
        turn = {**turn, "content": content[0]["text"]}
    for key in ("role", "content"):
        if key == "content" and turn.get(key) is None and turn.get("tool_calls"):
            continue  # as servers write a call without words
        if not isinstance(turn.get(key), str):
            raise InvalidValue(f"{location}: {key} of {where} must be text, not {kind_of(turn.get(key))}")
    role = turn["role"]
    if (known := SPEAKERS.get(role.strip().lower(), role)) != role:
        raise InvalidValue(f"{location}: role {role!r:.40} of {where} is not known; call it {known!r}")
    return {**turn, "content": ""} if turn.get("content") is None else turn


def _of_speaker(location: str, where: str, turn: Mapping[str, Any]) -> Message:
    """A turn of ShareGPT as a message, with all of its other keys."""
    speaker, words = turn["from"], turn.get("value")
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise InvalidValue(f"{location}: from {speaker!r:.40} of {where} is not known; it is one of {', '.join(SPEAKERS)}")
    if words is None and turn.get("tool_calls"):
        words = ""  # as servers write a call without words
    if not isinstance(words, str):
        raise InvalidValue(f"{location}: value of {where} must be text, not {kind_of(words)}")
    message = {"role": role, "content": words} | {key: value for key, value in turn.items() if key not in ("from", "value")}
    return message | {"content": "", "tool_calls": _calls(location, where, words)} if speaker in CALLING else message


def _calls(location: str, where: str, words: str) -> list[dict[str, Any]]:
    """The calls of a turn, which are JSON text: one object with name and arguments, or a list of them."""
    try:
        calls = _read(location, f"value of {where}", words)
    except json.JSONDecodeError:
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise InvalidValue(f'{location}: value of {where} must be a call as JSON, {{"name": .., "arguments": {{..}}}}')
    return [{"type": "function", "function": call} for call in calls]


def _arguments(calls: Any) -> Iterator[str]:
    """The arguments of calls that are text."""
    for call in calls if isinstance(calls, (list, tuple)) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            yield arguments


def _read(location: str, what: str, text: str) -> Any:
    """JSON text, no object of which holds a key twice."""
    try:
        return DISTINCT.decode(text)
    except Unreadable as error:
        raise InvalidValue(f"{location}: {what} {error}, and one of them would be dropped; keep one") from None


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value, however deep: a chat's template may render any of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(name)
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def kind_of(value: Any) -> str:
    """Return what a value is, in words."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return next((word for kind, word in WORDS.items() if isinstance(value, kind)), type(value).__name__).replace(" of messages", "")
