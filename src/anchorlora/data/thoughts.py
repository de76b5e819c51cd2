"""Thoughts of a message: where a chat template writes them, and what stands for one in `content`.

A template may write a thought of its own before an answer, empty or taken from a key of the message, or open one in the prompt. A
thought in `content` is then read as if it stood in that key, so that each is learned once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from anchorlora.data.templates import ANSWERED, ASKED, Messages, attempt, render
from anchorlora.errors import InvalidValue

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message
TAGS = ("think", "thinking", "thought", "reasoning")  # of a thought in `content`, whatever the template calls one
OPENED = re.compile(r"<([\w:]+)>\s*\Z")  # a thought that the template opens in the prompt
THOUGHT = re.compile(r"\s*<([\w:]+)>(.*?)</\1>(.*)\Z", re.DOTALL)  # before an answer's words
EMPTY = re.compile(r"(<([\w:]+)>\s*</\2>|(<\|(\w+)>)\w*\s*<\4\|>)\s*\Z")  # one that it closes there at once
CLOSED = re.compile(r"</[\w:]+>\s*\Z")
THINKS = "anchorlorawouldthink"  # words that no template writes


def without_lead(text: str, lead: str) -> str:
    """Return an answer without what the template writes before it, or without the thought that the model wrote there."""
    text, lead = text.strip(), lead.strip()
    if text.startswith(lead):
        return text[len(lead) :].strip()
    if closed := CLOSED.search(lead):
        return text.rpartition(closed[0].strip())[2].strip()
    return text


def decode_answer(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return what tokens of an answer say, without special ones and without thoughts that such end, as a channel's."""
    ids, end = list(ids), list(end_of_thought(tokenizer, str(tokenizer.chat_template)))
    start = next((at for at in range(len(ids), 0, -1) if ids[at - len(end) : at] == end), 0) if end else 0
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True))


@lru_cache(maxsize=4)
def end_of_thought(tokenizer: Any, template: str) -> tuple[int, ...]:
    """Return the tokens by which the template ends a thought, where text without special ones would not show it; else none."""

    def written(*reply: str) -> str:
        return _written(tokenizer, *reply).partition(ASKED)[2]

    ends: list[str] = []
    lead = written(ANSWERED).removeprefix(written()).partition(ANSWERED)[0]
    for whole in (written(ANSWERED, key) for key in THOUGHTS):
        end, _, after = whole.partition(THINKS)[2].partition(ANSWERED)
        ends += [end.removesuffix(lead) or end] if after else []
    for name in dict.fromkeys(re.findall(r"<\|(\w+)>", template)):
        whole = written(f"<|{name}>{THINKS}<{name}|>{ANSWERED}")
        ends += [f"<{name}|>"] if ANSWERED in whole and THINKS not in whole else []  # taken out of earlier answers
    read = (tuple(tokenizer(end.strip(), add_special_tokens=False, verbose=False).input_ids) for end in ends)
    return next((ids for ids in read if ids and not tokenizer.decode(ids[:1], skip_special_tokens=True)), ())


def extract_answer(text: str, lead: str, gold: str) -> str:
    """Return what a generated text answers: its words, without a thought where the right answer has none."""
    words = without_lead(text, lead)
    thought = _thought_in(words)
    return thought[3].strip() if thought and not _thought_in(gold) else words


def _thought_in(text: str) -> re.Match[str] | None:
    begun = THOUGHT.match(text)  # or a call in tags of its own, which is none
    return begun if begun and begun[1].rpartition(":")[2] in TAGS else None


def joined(location: str, prompt: str, whole: str, messages: Messages, write: Callable[..., str] | None = None) -> tuple[str, str]:
    """Return the text of an answered chat that begins with what a server would give, and the latter."""
    *before, reply = messages
    if whole.startswith(prompt):
        return whole, prompt
    opened = OPENED.search(prompt)
    if opened and whole.startswith(before_it := prompt[: opened.start()].rstrip()):
        blank, tag = prompt[len(before_it) : opened.start()], opened[1]
        rest = whole[len(before_it) :].removeprefix(blank).lstrip("\n")
        if rest.lstrip().startswith(f"<{tag}>"):
            return prompt + rest.lstrip()[len(f"<{tag}>") :].lstrip("\n"), prompt
        if rest.startswith(f"</{tag}>"):  # as GLM-4.7's, of an answer without a thought
            return prompt + rest, prompt
        inline = re.match(rf"\s*<{tag}>(.*?)</{tag}>", str(reply["content"]), re.DOTALL)
        given = next((str(reply[key]) for key in THOUGHTS if reply.get(key)), inline[1] if inline else "")
        thought = f"{given.strip()}\n" if given.strip() or not prompt.endswith("\n") else ""  # closed at once, on a line of its own
        return f"{prompt}{thought}</{tag}>\n\n{rest}", prompt
    closed = EMPTY.search(prompt)
    if closed and whole.startswith(prompt[: closed.start()]):
        rest = whole[closed.start() :]
        if not rest.startswith(closed[3] or f"<{closed[2]}>"):
            return prompt + rest.removeprefix(f"</{closed[2]}>"), prompt
        raise InvalidValue(
            f"{location}: the tokenizer's chat template ends a prompt with an empty thought, {closed[0].strip()!r}, so this "
            "answer's would never be written; take it out, or give a template that leaves the thought to the model"
        )
    if whole.startswith(prompt.rstrip()):  # a blank that the template writes for the model alone
        return prompt + whole[len(prompt.rstrip()) :].lstrip(), prompt
    # dropped once an answer follows: what stands beside earlier calls by gpt-oss's template, the system message by Mistral Nemo's
    called = [{k: v for k, v in m.items() if k not in THOUGHTS} if m.get("tool_calls") else m for m in before]
    silent = [{**m, "content": ""} if m.get("tool_calls") else m for m in called]
    for fewer in (called, silent, [m for m in before if m["role"] != "system"]):
        with suppress(InvalidValue):
            if write and write([*fewer, reply]) == whole:
                later = write(fewer, asking=True)
                return prompt + joined(location, later, whole, messages)[0][len(later) :], prompt
    raise InvalidValue(
        f"{location}: the tokenizer's chat template ends a prompt with {prompt[-40:]!r}, which it does not write before an answer, "
        "so the model would not be trained on what it is asked; give the rendered text as prompt and completion"
    )


def refuse_split(where: str, words: str, whole: str, tokenizer: Any) -> None:
    """Refuse an answer in whose own words the template sees the end of a thought."""
    closed = re.search("|".join(f"</{re.escape(tag)}>" for tag in _tags(tokenizer, str(tokenizer.chat_template))), words)
    if closed and words not in whole:
        raise InvalidValue(
            f"{where} holds {closed[0]!r} in its words, where the tokenizer's chat template ends a thought; begin the message with "
            f"{closed[0].replace('/', '')} if all before it is a thought, or give the rendered text as prompt and completion"
        )


def refuse_second(where: str, text: str, boundary: int) -> None:
    """Refuse an answer that thinks after the empty thought that the template writes."""
    begun = EMPTY.search(text, 0, boundary) or OPENED.search(text, 0, boundary)
    other = begun and begun.re is EMPTY and begun[3] and re.match(rf"\s*<({'|'.join(TAGS)})>", text[boundary:])
    answer = text[begun.start() if begun else boundary :]
    empty = re.match(r"\s*<([\w:]+)>\s*</\1>\s*", answer)
    if other or (empty and (answer.startswith(f"<{empty[1]}>", empty.end()) or f"</{empty[1]}>" in answer[empty.end() :])):
        raise InvalidValue(
            f"{where} holds a thought, and the tokenizer's chat template writes an empty one before it; put the thought into "
            f"{THOUGHTS[0]!r}, take it out, or give the rendered text as prompt and completion"
        )


def apart(location: str, messages: Messages, tokenizer: Any) -> list[Mapping[str, Any]]:
    """Return messages with thoughts moved to a key of their own, if the template takes none in `content`."""
    parted, template = list(messages), str(tokenizer.chat_template)
    for i, message in enumerate(messages):
        parts = THOUGHT.match(str(message["content"])) if message["role"] == "assistant" else None
        if not parts or parts[1] not in _tags(tokenizer, template):
            continue
        given = next((key for key in THOUGHTS if message.get(key)), None)
        if given is not None:
            raise InvalidValue(
                f"{location}: message {i + 1} (role 'assistant') begins with a thought in <{parts[1]}>, and {given!r} holds "
                "another; keep one of them"
            )
        key = _key(tokenizer, template, parts[1])
        if key:
            parted[i] = {**message, key: parts[2].strip("\n"), "content": parts[3].lstrip("\n")}
    return parted


def own_words(content: str, tokenizer: Any) -> str:
    """Return a message's own words, without a thought that stands before them in the template's own tags."""
    thought, template = THOUGHT.match(content), str(tokenizer.chat_template)
    if thought and thought[1] in _tags(tokenizer, template) and f"</{thought[1]}>" in template:
        return thought[3].strip()
    return content.strip()


@lru_cache(maxsize=4)
def _tags(tokenizer: Any, template: str) -> frozenset[str]:
    """Tags of a thought: the usual ones, and those in which the template opens, closes or writes one; never those of a call."""
    tags = set(TAGS)
    for reply in ((), (ANSWERED,), *((ANSWERED, key) for key in THOUGHTS)):
        text = _written(tokenizer, *reply).partition(ASKED)[2]
        closed = re.search(rf"<([\w:]+)>\s*(?:{THINKS}\s*)?</\1>\s*(?:{ANSWERED}|\Z)", text)
        begun = closed or (None if reply else OPENED.search(text))
        tags |= {begun[1]} if begun else set()
    return frozenset(tags)


@lru_cache(maxsize=4)
def _key(tokenizer: Any, template: str, tag: str) -> str:
    """The key of a thought in a template that writes one of its own before one in `content`, or does not know the tag; else ""."""
    once = rf"<{tag}>\s*{THINKS}\s*</{tag}>\s*{ANSWERED}"
    if not re.search(f"</?{tag}>", template):
        once = rf"{THINKS}(?s:.*){ANSWERED}"
    else:
        inside = _written(tokenizer, f"<{tag}>\n{THINKS}\n</{tag}>\n\n{ANSWERED}")
        if not re.search(rf"</?{tag}>\s*<{tag}>\s*{THINKS}", inside):
            return ""
    return next((key for key in THOUGHTS if re.search(once, _written(tokenizer, ANSWERED, key))), "")


def _written(tokenizer: Any, answer: str | None = None, key: str | None = None) -> str:
    """Text that a template writes of a question and an answer with a thought in one of its keys; "" where it refuses them."""
    reply = {"role": "assistant", "content": answer} | ({key: THINKS} if key else {})
    messages: Messages = [{"role": "user", "content": ASKED}, *([reply] if answer is not None else [])]
    return attempt(partial(render, "", tokenizer=tokenizer, asking=answer is None), messages) or ""
