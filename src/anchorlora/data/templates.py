"""Renderings of chat templates, within limits and on the day of the run; and the tokens at which a server stops."""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

from anchorlora.data.samples import is_unicode
from anchorlora.errors import InvalidValue, message_of

Messages = Sequence[Mapping[str, Any]]
ASKED, ANSWERED = "anchorlorawouldask", "anchorlorawouldanswer"  # words that no template writes
QUESTION, REPLY = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}
ARGUMENTS = {ASKED: ANSWERED}
CALL = {"id": "call00000", "type": "function", "function": {"name": ASKED, "arguments": ARGUMENTS}}
SECONDS, LARGEST = 20.0, 2**24  # that a template may take for one chat, and characters that it may write
CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


def render(location: str, messages: Messages, tokenizer: Any, *, asking: bool = False, tools: Messages = ()) -> str:
    """Return a chat as the tokenizer's template writes it, on the date of the run (`tokenizer.rendered_at`) if there is one."""
    if not tokenizer.chat_template:
        raise InvalidValue(
            f"{location}: this is a chat, and the tokenizer has no chat template; name one with --set chat_template=FILE, "
            "save the one that was trained with into the adapter's folder, or give plain text as prompt and completion"
        )
    clock = getattr(tokenizer, "rendered_at", None)
    how: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
    if clock is not None and "strftime_now" in str(tokenizer.chat_template):
        how["chat_template"] = _set_date(tokenizer.get_chat_template(tools=list(tools) or None), clock)

    def write() -> Any:
        as_read = _in_parts if _reads_parts(tokenizer, str(tokenizer.chat_template)) else dict
        chat: list[dict[str, Any]] = [as_read(message) for message in messages]
        if any(message.get("tool_calls") for message in chat):
            template = how.get("chat_template") or tokenizer.get_chat_template(tools=list(tools) or None)
            chat = [_convert_calls(message, as_text=_reads_text(tokenizer, template)) for message in chat]
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=asking, **how)

    try:
        text = _within(SECONDS, write)
    except TimeoutError:
        raise InvalidValue(f"{location}: the tokenizer's chat template does not end; fetch the tokenizer again") from None
    except Exception as error:  # a template is a program of its own and raises what it likes
        raise InvalidValue(
            f"{location}: the tokenizer's chat template refuses these messages: {message_of(error)}; change the row, give the "
            "rendered text as prompt and completion, or, if the template came with --set chat_template=FILE, name another"
        ) from None
    if len(text) > LARGEST:
        raise InvalidValue(f"{location}: the tokenizer's chat template writes {len(text):,} characters; fetch the tokenizer again")
    if not is_unicode(text):
        raise InvalidValue(
            f"{location}: the tokenizer's chat template adds characters that are not Unicode text; fetch the tokenizer again"
        )
    return str(text)


def attempt(write: Callable[..., str], messages: Messages, **how: Any) -> str | None:
    """Return what a template writes of messages, as `write` asks it; None where it refuses them."""
    with suppress(InvalidValue):
        return write(messages, **how)
    return None


@lru_cache(maxsize=4)
def _reads_parts(tokenizer: Any, template: str) -> bool:
    """Return whether a template writes content that is a list of parts, but not text, as for some vision models."""

    def writes(as_read: Callable[[Mapping[str, Any]], dict[str, Any]]) -> bool:
        text = _try(tokenizer, [as_read(QUESTION), as_read(REPLY)])
        return ASKED in text and ANSWERED in text

    return not writes(dict) and writes(_in_parts)


def _try(tokenizer: Any, chat: Messages, **how: Any) -> str:
    """Text that a template writes for a chat; "" if it refuses the chat."""
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **how))
    except Exception:  # a template is a program of its own and raises what it likes
        return ""


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@lru_cache(maxsize=4)
def _reads_text(tokenizer: Any, template: str) -> bool:
    """Return whether a template writes the arguments of a call that are text, and no object as JSON."""
    chat: Messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]

    def written(*, as_text: bool) -> str:
        return _try(tokenizer, [_convert_calls(message, as_text=as_text) for message in chat], chat_template=template)

    objects = written(as_text=False)
    return (not objects or str(ARGUMENTS) in objects) and json.dumps(ARGUMENTS) in written(as_text=True)


def _convert_calls(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A message whose calls have their arguments as an object, whichever way the row gives them, or as text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return dict(message)
    turned = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "name" in function:
            function = {**function, "arguments": _arguments(function.get("arguments"), as_text=as_text)}
            call = {**call, "function": function} if "function" in call else function
        turned.append(call)
    return {**message, "tool_calls": turned}


def _arguments(given: Any, *, as_text: bool) -> Any:
    """The arguments of a call as an object, or as text; text that holds no object stands as it is."""
    if as_text:
        return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        read = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    return read if isinstance(read, dict) else given


def _set_date(template: str, clock: datetime) -> str:
    """A template that writes one day's date; functions that a caller passes do not reach templates in every version."""
    dated = CLOCK.sub(lambda asked: json.dumps(clock.strftime(asked[2])), template)
    if "strftime_now(" in dated:
        raise InvalidValue("the tokenizer's chat template computes the format of its date; write the format into the template")
    return dated


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what a call returns; a call that takes longer is ended with TimeoutError."""
    worker = getattr(_OWN, "worker", None)
    if worker is None or not worker.is_alive():  # as after a fork
        worker = _OWN.worker = _Worker()
    outcome: Future[Any] = Future()
    worker.calls.put((call, outcome))
    if not wait([outcome], seconds).done:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(SystemExit))
        worker.calls.put(None)
        _OWN.worker = None
        raise TimeoutError
    return outcome.result()


class _Worker(threading.Thread):
    """A thread that makes calls, one after the other; to start one for each takes longer than most templates."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]()
        self.start()

    def run(self) -> None:
        while (job := self.calls.get()) is not None:
            call, outcome = job
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)
            del job, call, outcome


_OWN = threading.local()  # the worker of each thread


def stop_ids(tokenizer: Any, ends: Iterable[int] = ()) -> frozenset[int]:
    """Return the tokens at which a server stops: the tokenizer's end, those given, and the end of the assistant's turn."""
    stops = {int(end) for end in ends}
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    if tokenizer.chat_template:

        def after(*messages: Mapping[str, Any]) -> list[int]:
            text = render("", messages, tokenizer).partition(ANSWERED)[2].partition(ASKED)[0].lstrip()
            return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) if text else []

        try:
            ids, between = after(QUESTION, REPLY), after(QUESTION, REPLY, QUESTION)
        except InvalidValue:  # of these messages; what a row gives is asked again
            return frozenset(stops)
        if ids and ids[0] in tokenizer.get_added_vocab().values() and stops.isdisjoint(between):
            stops.add(int(ids[0]))
    return frozenset(stops)


@lru_cache(maxsize=8)
def closing(tokenizer: Any, template: str, stops: frozenset[int], *, calls: bool) -> str:
    """Return the stop that a template writes after an answer only where the chat goes on, as GLM-4's next marker; else ""."""
    reply, result = {**REPLY, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": CALL["id"], "content": ASKED}
    chat: Messages = [QUESTION, reply, result] if calls else [QUESTION, REPLY, QUESTION]
    try:
        whole, later = render("", chat[:2], tokenizer), render("", chat, tokenizer)
    except InvalidValue:
        return ""
    ends = "|".join(re.escape(token) for token, number in tokenizer.get_added_vocab().items() if number in stops)
    first = re.match(rf"\s*(?:{ends})", later[len(whole) :]) if ends and later.startswith(whole) else None
    return first[0] if first else ""


def refuse_deaf(tokenizer: Any) -> None:
    """Refuse a chat template that does not write what it is given."""
    text = render("the chat template, tried on two messages", (QUESTION, REPLY), tokenizer)
    for word, role in ((ASKED, "user"), (ANSWERED, "assistant")):
        if word not in text:
            raise InvalidValue(f"the tokenizer's chat template does not write the {role}'s message; give a template that does")
