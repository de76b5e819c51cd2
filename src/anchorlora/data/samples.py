"""Training text in the forms that people keep, one sample per row:

    messages              a chat, [{role, content}, ..], which the tokenizer's own template renders
    prompt, completion    two texts or two lists of messages, joined; `answer` for `completion` works as well
    instruction, output   and `input` if there is one: a chat of two messages; Alpaca's prompt for a tokenizer without a template
    text                  plain text

Columns of other names are read if they are asked for: "body" reads text or messages, "prompt=question,completion=reply" says which
column is which. The first row decides which columns are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from anchorlora.errors import InvalidValue

FORMS = (("messages",), ("prompt", "completion"), ("prompt", "answer"), ("instruction", "output"), ("text",))
TOKENS = ("prompt_ids", "completion_ids")  # of text that a model wrote, token for token; the other columns are for readers
# columns that say something of a row and hold nothing to learn, beside numbers
FACTS = frozenset(
    (  # noqa: SIM905
        "id idx index uuid guid hash sha256 source sources origin url uri link file filename path dataset subset split category "
        "categories tag tags topic subject domain task task_name type kind lang language locale license date timestamp created "
        "created_at updated_at author difficulty level metadata meta model model_name title label labels conversation_id "
        "message_tree_id prompt_id"
    ).split()
)
WEIGHT = re.compile(r"(^|_)(weight|reward|advantage)s?($|_)")  # numbers that say how much of a row is to be learned
TRUTH = ("true", "false")  # also as a file of text writes it
KNOWN_NAMES = frozenset(name for form in FORMS for name in form)
KNOWN = "messages; prompt and completion; instruction and output; text"
# Stanford Alpaca's prompts, with and without an input
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ASKING = (("prompt", "answer"), ("prompt", "completion"), ("messages",))  # columns of prompts with their answers
KINDS: Mapping[str, tuple[type, ...]] = {"messages": (list,), "text": (str,)}  # of other columns: text or messages
WORDS = {str: "text", list: "a list of messages", dict: "an object", bool: "a truth value", type(None): "nothing"}


@dataclass(frozen=True)
class Sample:
    """One row of training text."""

    place: str  # where it comes from, such as "old.jsonl, line 7"
    content: str | tuple[Mapping[str, Any], ...]  # A text, or the messages of a chat
    given: int = 0  # characters or messages at the beginning that are the prompt, of which nothing is learned
    plain: Sample | None = None  # the same as plain text, for a tokenizer without a chat template; None where there is no such form
    tools: tuple[Mapping[str, Any], ...] = ()  # the functions that a chat may call, as the template takes them
    ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # tokens of prompt and answer, where the text was written as tokens
    continued: int = 0

    def turns(self) -> list[tuple[str | tuple[Mapping[str, Any], ...], str]]:
        """Return what a model can learn of the sample: pairs of a prompt and its answer.

        Of a chat, every message of the assistant is an answer to all messages before it, as it will be when the model is used.
        """
        if isinstance(self.content, str):
            return [(self.content[: self.given], self.content[self.given :])]
        return [(self.content[:i], self.content[i]["content"]) for i in self.learned]

    @property
    def learned(self) -> list[int]:
        """Places of the messages of a chat that are learned: those of the assistant that are not given."""
        messages = () if isinstance(self.content, str) else self.content
        return [i for i, message in enumerate(messages) if i >= self.given and message["role"] == "assistant"]


def samples_of(
    rows: Iterable[tuple[str, Any]], *, source: str, column: str | None = None, limit: int | None = None
) -> list[Sample]:
    """Return rows as samples, all of them checked."""
    return list(iterated(rows, source=source, column=column, limit=limit))


def iterated(
    rows: Iterable[tuple[str, Any]], *, source: str, column: str | None = None, limit: int | None = None
) -> Iterator[Sample]:
    """Yield rows as samples, one by one; see `samples_of`."""
    columns, names = tuple[str, ...](), _names(column)
    place = None
    for place, row in islice(rows, limit):
        if not isinstance(row, Mapping):
            raise InvalidValue(f"{place}: a row is an object with named columns, not {_kind(row)}")
        _refuse_judged(place, row)
        if names:
            row, column = _renamed(place, row, names), None
        if column is None and all(row.get(name) is not None for name in TOKENS):
            yield _written(place, row)
            continue
        columns = columns or _columns(place, row, column)
        if column is None:
            _refuse_unread(place, row, columns)
        yield _sample(place, row, columns) if column is None else Sample(place, _content(place, row, columns))
    if place is None:
        raise InvalidValue(f"{source} holds no row; give at least one example")


def _names(column: str | None) -> dict[str, str]:
    """Known column -> what it is called, of pairs "prompt=question"; none of a plain list of columns."""
    if column is None or "=" not in column:
        return {}
    pairs = [pair.partition("=") for pair in column.split(",")]
    names = {known.strip(): called.strip() for known, _, called in pairs}
    allowed = sorted({name for form in FORMS for name in form} | {"input"})
    for known, called in names.items():
        if known not in allowed or not called:
            raise InvalidValue(f"{column!r}: {known!r} is not a known column; pairs are KNOWN=YOURS with {', '.join(allowed)}")
    return names


def _renamed(place: str, row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    for called in names.values():
        if row.get(called) is None:
            raise InvalidValue(f"{place}: no column {called!r}; it has: {_listed(row)}")
    return {known: row[called] for known, called in names.items()}


def _refuse_judged(place: str, row: Mapping[str, Any]) -> None:
    """Refuse a row that says how good its answer is, or how much of it is to be learned."""
    for name, value in row.items():
        called, written = str(name).lower(), str(value).strip().lower()
        if called in ("label", "kto_tag") and written in TRUTH:
            raise InvalidValue(
                f"{place}: {name!s:.40} is {written}, as in rows for KTO, and every answer would be learned as good; keep the "
                "good rows, without this column, or train with TRL's KTOTrainer and ProtectionCallback"
            )
        if called == "train" and written == "false":
            raise InvalidValue(f"{place}: train is false, so nothing of the row is to be learned; take the row out")
        number = _number(value)
        if WEIGHT.search(called) and number is not None and number != 1:
            raise InvalidValue(
                f"{place}: {name!s:.40} is {value!s:.20}, and every row is learned with weight 1; take out the row, or the column"
            )


def _refuse_unread(place: str, row: Mapping[str, Any], columns: tuple[str, ...]) -> None:
    """Refuse a row with text or a truth value in a column that would not be read: it would be dropped without a word."""
    read = {*columns, "tools", "train", *(("input",) if columns == ("instruction", "output") else ())}
    for name, value in row.items():
        if name not in read and str(name).lower() not in FACTS and (isinstance(value, bool) or _is_text(value)):
            raise InvalidValue(
                f"{place}: column {name!s:.40} would not be learned; put its text into {columns[0]}, take it out, or name the "
                f"columns to read with --columns {','.join(f'{known}={known}' for known in columns)}"
            )


def _is_text(value: Any) -> bool:
    """Whether a value may say something: no number, also as a file of text writes it."""
    if isinstance(value, str):
        return bool(value.strip()) and _number(value) is None
    return isinstance(value, (list, dict, tuple)) and bool(value)


def _number(value: Any) -> float | None:
    """A number, also as a file of text writes it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _written(place: str, row: Mapping[str, Any]) -> Sample:
    """A text that a model wrote, as the tokens that it drew."""
    ids = []
    for name in TOKENS:
        if not isinstance(row[name], list) or not all(type(i) is int and i >= 0 for i in row[name]):
            raise InvalidValue(f"{place}: {name} must be a list of token ids, not {_kind(row[name])}")
        ids.append(tuple(row[name]))
    if "messages" in row:
        return Sample(place, _content(place, row, ("messages",)), ids=(ids[0], ids[1]))
    return Sample(place, _content(place, row, ("text",)), ids=(ids[0], ids[1]))


def _sample(place: str, row: Mapping[str, Any], columns: tuple[str, ...]) -> Sample:
    if columns == ("instruction", "output"):
        return _instructed(place, row)
    content = _content(place, row, columns)
    tools = () if isinstance(content, str) else _tools(place, row)
    if columns[0] != "prompt" or len(columns) != 2:
        return Sample(place, content, tools=tools)
    given = len(row["prompt"])
    if not isinstance(content, str) and content[given - 1]["role"] == content[given]["role"] == "assistant":
        begun, rest = content[given - 1], content[given]  # one message, of which the prompt has the beginning
        whole = {**begun, **rest, "content": begun["content"] + rest["content"]}
        content, given = (*content[: given - 1], whole, *content[given + 1 :]), given - 1
        return Sample(place, content, given=given, tools=tools, continued=len(begun["content"]))
    return Sample(place, content, given=given, tools=tools)


def _tools(place: str, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The tools of a chat, which data sets keep as objects or as JSON text."""
    tools = row.get("tools") or ()
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise InvalidValue(f"{place}: tools must be a list of objects, or such a list as JSON text") from None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidValue(f"{place}: tools must be a list of objects, not {_kind(tools)}")
    return tuple(tools)


def _instructed(place: str, row: Mapping[str, Any]) -> Sample:
    """A row of Alpaca's form."""
    instruction, output = (_value(place, row, name) for name in ("instruction", "output"))
    further = _value(place, row, "input") if row.get("input") else ""
    for name, value in (("instruction", instruction), ("output", output), ("input", further)):
        if not isinstance(value, str):
            raise InvalidValue(f"{place}: {name} must be text, not {_kind(value)}")
    question = (WITH_INPUT if further else WITHOUT_INPUT).format(instruction=instruction, input=further)
    plain = Sample(place, question + output, given=len(question))
    asked = {"role": "user", "content": f"{instruction}\n{further}" if further else instruction}
    return Sample(place, (asked, {"role": "assistant", "content": output}), given=1, plain=plain)


@dataclass(frozen=True)
class Question:
    """A prompt with its right answer."""

    place: str  # where it comes from, such as "mine.jsonl, line 7"
    prompt: str | tuple[Mapping[str, Any], ...]  # A text, or the messages of a chat before the answer
    answer: str
    tools: tuple[Mapping[str, Any], ...] = ()  # the functions that a chat may call


def questions_of(rows: Iterable[tuple[str, Any]], *, source: str) -> list[Question]:
    """Return rows as prompts with their answers, all of them checked.

    Columns are prompt and answer, prompt and completion, or messages, whose last one, from the assistant, is the answer.
    """
    found = [_question(place, row) for place, row in rows]
    if not found:
        raise InvalidValue(f'{source} holds no row; give one {{"prompt": text, "answer": text}} per line')
    return found


def _columns(place: str, row: Mapping[str, Any], column: str | None) -> tuple[str, ...]:
    """Columns that the first row asks for; a column that holds null counts as absent."""
    there = [name for name, value in row.items() if value is not None]
    listed = _listed(row)
    if column is not None:
        wanted = (column,) if column in there else tuple(name.strip() for name in column.split(","))
        for name in wanted:
            if name not in there:
                raise InvalidValue(f"{place}: no column {name!r}; it has: {listed}")
        return wanted
    found = [form for form in FORMS if all(name in there for name in form)]
    if not found:
        raise InvalidValue(f"{place}: no known column ({KNOWN}); it has: {listed}; name one with --column")
    if len(found) > 1:
        both = " or ".join(",".join(form) for form in found)
        raise InvalidValue(f"{place}: ambiguous columns, {both} are possible; name one of them with --column")
    return found[0]


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name!s:.40}" for name, value in list(row.items())[:12] if value is not None) or "none"


def _question(place: str, row: Any) -> Question:
    if not isinstance(row, Mapping):
        raise InvalidValue(f"{place}: a row is an object with named columns, not {_kind(row)}")
    form = next((form for form in ASKING if all(row.get(name) is not None for name in form)), None)
    if form is None:
        listed = ", ".join(f"{name!s:.40}" for name in list(row)[:12]) or "none"
        wanted = "; ".join(" and ".join(each) for each in ASKING)
        raise InvalidValue(f"{place}: no prompt with an answer ({wanted}); it has: {listed}")
    _refuse_judged(place, row)
    _refuse_unread(place, row, form)
    values = [_value(place, row, name) for name in form]
    *before, last = [part for value in values for part in ([value] if isinstance(value, str) else value)]
    if isinstance(last, Mapping) and last["role"] != "assistant":
        raise InvalidValue(f"{place}: the last message must be the assistant's, the right answer; it is from {last['role']!r:.40}")
    if isinstance(last, Mapping) and (last.get("train") is False or _number(last.get("weight", 1)) == 0):
        raise InvalidValue(f"{place}: the last message is not to be learned (weight or train), so it is no right answer")
    answer = last if isinstance(last, str) else last["content"]
    texts = [part if isinstance(part, str) else part["content"] for part in before]
    if not (answer.strip() and any(texts)):
        raise InvalidValue(f"{place}: the {'prompt' if answer.strip() else 'answer'} is empty; give both, or take the row out")
    messages = tuple(part for part in before if isinstance(part, Mapping))
    if messages and len(messages) < len(before):
        raise InvalidValue(f"{place}: the prompt is text and the answer a chat; give both as text, or both as messages")
    return Question(place, messages or texts[0], answer, _tools(place, row) if messages else ())


def _content(place: str, row: Mapping[str, Any], columns: tuple[str, ...]) -> str | tuple[Mapping[str, Any], ...]:
    asked = [name for name in columns if row.get(name) is not None or name in KNOWN_NAMES] or columns  # others may be empty
    values = [_value(place, row, name) for name in asked]
    if row.get("tools") and isinstance(values[0], str):
        raise InvalidValue(f"{place}: column tools would not be learned; give the row as messages, or take the column out")
    if all(isinstance(value, str) for value in values):
        return "".join(values)
    if all(isinstance(value, list) for value in values):
        return tuple(
            {**message, "content": ""} if message.get("content") is None else message for value in values for message in value
        )
    raise InvalidValue(f"{place}: {' and '.join(columns)} must all be text or all be lists of messages")


def _value(place: str, row: Mapping[str, Any], name: str) -> Any:
    value: Any = row.get(name)
    kinds = KINDS.get(name, (str, list))
    if value is None:
        raise InvalidValue(f"{place}: no column {name!r}, which the first row has; give every row the same columns")
    if not isinstance(value, kinds):
        wanted = " or ".join(WORDS[kind] for kind in kinds)
        raise InvalidValue(f"{place}: {name} must be {wanted}, not {_kind(value)}")
    if isinstance(value, list):
        _refuse_messages(place, name, value)
    if not all(map(is_unicode, _texts(value))):
        raise InvalidValue(f"{place}: {name} holds characters that are not Unicode text; save the file as UTF-8")
    return value


def is_unicode(text: str) -> bool:
    """Tell whether text has no half characters, which no file in UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def _refuse_messages(place: str, name: str, messages: list[Any]) -> None:
    if not messages:
        raise InvalidValue(f"{place}: {name} is an empty list; take the row out")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise InvalidValue(f"{place}: message {i} of {name} must be an object with role and content, not {_kind(message)}")
        for key in ("role", "content"):
            if key == "content" and message.get(key) is None and message.get("tool_calls"):
                continue  # as servers write a call without words
            if not isinstance(message.get(key), str):
                raise InvalidValue(f"{place}: {key} of message {i} of {name} must be text, not {_kind(message.get(key))}")


def _kind(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return next((word for kind, word in WORDS.items() if isinstance(value, kind)), type(value).__name__).replace(" of messages", "")
