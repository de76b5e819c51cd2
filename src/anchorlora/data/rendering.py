"""One law for text: rendered once, tokenized once, masked by offsets.

    whole    what the chat template writes of messages and answer, or prompt + completion as they stand
    prompt   what a server would give the model; the tokens of `whole` that end within it
    answer   the tokens after it, up to the first token at which a server stops; nothing is learned after that
    label    the answer as text, without the stop and without what the template writes before the message's own words

Every character of every message, and every key, is in the rendering, or the row is refused by its name. A character of an
answer that the tokenizer does not know is refused; one of a prompt is noted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from anchorlora.data import thoughts
from anchorlora.data.dropped import Write, refuse_dropped
from anchorlora.data.prompts import Encoder
from anchorlora.data.samples import Example, Sample
from anchorlora.data.templates import ANSWERED, ASKED, Messages, attempt, closing, render
from anchorlora.data.thoughts import decode_answer, without_lead
from anchorlora.data.tokenized import Tokenized, first_after
from anchorlora.errors import InvalidValue


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer as tokens."""

    text: str  # the prompt as it was tokenized
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # tokens of the answer and its end
    head: int = 0
    lead: str = ""  # what the template writes before the answer's own words
    label: str = ""  # the answer as text
    unknown: tuple[str, ...] = ()  # parts of the prompt that the tokenizer does not know
    split: str = ""  # how the prompt's own tokens differ from those before the answer, a key of `SPLIT`; "" where they are the same


def chat_ids(sample: Sample, tokenizer: Any, *, answering: bool = False) -> list[int]:
    """Return the tokens of a chat, as the tokenizer's chat template renders it."""
    assert not isinstance(sample.content, str)
    write = partial(render, sample.place, tokenizer=tokenizer, tools=sample.tools)
    messages = thoughts.apart(sample.place, sample.content, tokenizer)
    text = write(messages, asking=answering)
    whole = write(messages) if answering else text
    refuse_dropped(sample.place, messages, text, write, sample.tools, whole=whole)
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def chat_turn(example: Example, encoder: Encoder) -> Turn:
    """Return the assistant's answer to a chat as tokens, after the prompt that a server would give."""
    location, tokenizer, stops = example.place, encoder.tokenizer, encoder.stops
    reply = example.reply or {"role": "assistant", "content": example.label}
    messages = [*example.messages, reply]
    if not example.continued:
        messages = thoughts.apart(location, messages, tokenizer)
    *before, reply = messages
    write = partial(render, location, tokenizer=tokenizer, tools=example.tools)
    whole, content = write(messages), str(reply["content"])
    asked = write(before, asking=True) if before else None
    prompt = _opening(write, whole, reply) if asked is None else asked
    where, words = f"{location}: message {len(messages)} (role 'assistant')", thoughts.own_words(content, tokenizer)
    thoughts.refuse_split(where, words, whole, tokenizer)
    text, prompt = thoughts.joined(location, prompt, whole, messages, write)
    boundary = len(prompt)
    thoughts.refuse_second(where, text, boundary)
    start = _start(write, text, boundary, words, messages)
    refuse_dropped(location, messages, text, write, example.tools, whole=whole, asked=asked, learned=example.learned)
    if example.continued:
        boundary = _goes_on(where, text, (boundary, start, _end(write, text, messages)), content, example.continued)
        start = max(start, boundary)
    end = closing(tokenizer, str(tokenizer.chat_template), stops, calls=bool(reply.get("tool_calls")))
    read = Tokenized.of(location, text + end, boundary, tokenizer, special=False)
    first = first_after(read.offsets, boundary)
    added = tokenizer.get_added_vocab().values()
    while first < len(read.ids) and (begin := read.offsets[first][0]) < boundary and read.ids[first] in added:
        if not text[begin:boundary].strip():
            break  # the answer's own blanks, which some tokenizers add tokens for
        first += 1  # a token of the template that takes the blanks after it
    read, first, split = read.served(first, apart=not example.continued)
    first = max(first, 1)  # nothing comes before the first token, where a template writes nothing before a chat
    if split and split != "white" and not example.continued:
        split = "template"
    answer = _end_at_stop(location, read.ids[first:], encoder)
    lead = decode_answer(tokenizer, read.ids[first : first_after(read.offsets, start)])
    too_long = first + len(answer) > encoder.max_tokens
    head = first_after(read.offsets, _head(write, text, before)) if too_long else 0
    label = without_lead(decode_answer(tokenizer, answer[:-1] if answer[-1] in stops else answer), lead)
    unknown = read.unknown(first + len(answer), own=reply)
    return Turn(text[:boundary], tuple(read.ids[:first]), answer, head, lead.strip(), label, unknown, split)


def text_turn(example: Example, encoder: Encoder) -> Turn:
    """Return prompt and answer as tokens, as they stand, with the tokenizer's own beginning and one end."""
    prompt, answer, tokenizer, end = example.sentence, example.label, encoder.tokenizer, encoder.end
    begun = encoder.begins(prompt + answer)
    read = Tokenized.of(example.place, prompt + answer, len(prompt), tokenizer, special=not begun)
    ids, offsets = read.ids, read.offsets
    while len(ids) > 1 and ids[-1] == end and offsets[-1][0] == offsets[-1][1]:
        del ids[-1], offsets[-1]  # some tokenizers end what they read
    if not prompt:  # plain text may hold the ends of documents
        read.unknown(len(ids) + 1, own=answer)
        ids = ids if ids and ids[-1] == end else [*ids, end]
        kept = 1 if len(ids) > 1 else 0
        return Turn("", tuple(ids[:kept]), tuple(ids[kept:]), 0, "", answer)
    read, first, split = read.served(first_after(read.offsets, len(prompt)))
    written = _end_at_stop(example.place, read.ids[first:], encoder)
    head = len(encoder.beginning) if begun else next((i for i, (a, b) in enumerate(read.offsets) if a != b), 0)
    label = decode_answer(tokenizer, written[:-1] if written[-1] in encoder.stops else written).strip()
    return Turn(prompt, tuple(read.ids[:first]), written, head, "", label, read.unknown(first + len(written), own=answer), split)


def _opening(write: Write, whole: str, reply: Mapping[str, Any]) -> str:
    """Text before the first message of a chat, the assistant's: no server writes it, so its end is that of other prompts."""
    with suppress(InvalidValue):
        asked = [{"role": "user", "content": ASKED}]
        header = write(asked, asking=True).removeprefix(write(asked))
        if header and header in whole:
            return whole[: whole.index(header) + len(header)]
    return (attempt(write, [{**reply, "content": ANSWERED}]) or "").partition(ANSWERED)[0]


def _start(write: Write, text: str, boundary: int, content: str, messages: Messages) -> int:
    """Where the answer's own words begin in a text: before what the template writes after any words, and as long as they are."""
    if messages[-1].get("tool_calls"):
        return _call_start(write, text, boundary, content, messages)
    marked = attempt(write, [*messages[:-1], {**messages[-1], "content": ANSWERED}])
    if marked is None:
        return max(text.rfind(content, boundary), boundary)
    before, _, tail = marked.rpartition(ANSWERED)
    end = len(text.removesuffix(tail))
    written = text[boundary:end].rstrip()
    if written.endswith(content):
        return boundary + len(written) - len(content) if content else end
    lead = before[boundary:].rstrip() if before[:boundary] == text[:boundary] else ""
    return boundary + len(lead) if text.startswith(lead, boundary) else boundary


def _end(write: Write, text: str, messages: Messages) -> int:
    """Where the answer's words end in a text: before what the template writes after any words."""
    marked = attempt(write, [*messages[:-1], {**messages[-1], "content": ANSWERED}]) or ""
    return len(text.removesuffix(marked.rpartition(ANSWERED)[2]))


def _goes_on(where: str, text: str, places: tuple[int, int, int], content: str, given: int) -> int:
    """Where a message goes on after its part in the prompt; found from its end, since templates rewrite blanks and thoughts."""
    prompt, start, end = places
    begun, rest = content[:given], content[given:]
    seen, begins = "".join(begun.split()), []
    for words in (rest, rest.rstrip(), rest.lstrip(), rest.strip()):
        at = end - len(words)
        before, own = ("".join(text[since:at].split()) for since in (0, start))
        if at >= prompt and text.endswith(words, 0, end) and before.endswith(seen) and seen.endswith(own):
            begins.append(at)
    if not begins:
        raise InvalidValue(
            f"{where} begins in the prompt with {begun!r:.40}, and the tokenizer's chat template does not write its words and the "
            "completion's one after the other; give the rendered text as prompt and completion"
        )
    return next((at for at in begins if text.endswith(begun, 0, at)), begins[0])


def _call_start(write: Write, text: str, boundary: int, content: str, messages: Messages) -> int:
    """Where an answer that calls tools begins in a text: after the thought that the template writes before any answer."""
    thought = str(messages[-1]["content"]).rstrip().removesuffix(content)
    reply = {key: value for key, value in messages[-1].items() if key != "tool_calls"} | {"content": thought + ANSWERED}
    other = [*messages[:-1], reply]
    try:
        plain, prompt = thoughts.joined("", text[:boundary], write(other), other, write)
    except InvalidValue:
        plain, prompt = "", ""
    lead = plain.rpartition(ANSWERED)[0][len(prompt) :]
    lead = lead[: _alike(lead, text[boundary:])]
    if re.match(r"\w\w", text[boundary + len(lead) - 1 : boundary + len(lead) + 1]):  # inside a word, as of "final" and "function"
        lead = re.sub(r"\w+\Z", "", lead)
    start = boundary + len(lead)
    for key in thoughts.THOUGHTS:  # some templates write one beside calls alone
        thought = str(messages[-1].get(key) or "").strip()
        at = text.find(thought, start) if thought else -1
        closed = re.compile(r"\s*(</[\w:]+>|<\w+\|>)").match(text, at + len(thought)) if at >= 0 else None
        start = closed.end() if closed else start
    return start


def _end_at_stop(location: str, ids: Sequence[int], encoder: Encoder) -> tuple[int, ...]:
    """An answer's tokens up to its stop, which follows where there is none."""
    tokenizer, stops = encoder.tokenizer, encoder.stops
    at = next((i for i, token in enumerate(ids) if token in stops), None)
    if at is None:
        return (*ids, encoder.end)
    if any(token not in stops and tokenizer.decode([token]).strip() for token in ids[at + 1 :]):
        raise InvalidValue(
            f"{location}: the answer holds {tokenizer.decode([ids[at]])!r}, at which every server stops, so what follows would "
            "never be said; take it out of the text, or split the row"
        )
    return tuple(ids[: at + 1])


def _head(write: Write, text: str, messages: Messages) -> int:
    """Where the words of the first message that is not the system's begin."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), None)
    if first is None:
        return 0
    other = [*messages[:first], {**messages[first], "content": ASKED}, *messages[first + 1 :]]
    return _alike((attempt(write, other, asking=True) or "").partition(ASKED)[0], text)


def _alike(one: str, other: str) -> int:
    """How many characters at the beginning of two texts are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
