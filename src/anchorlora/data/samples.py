"""One row of training text, and the examples that a model can learn of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

Message = Mapping[str, Any]  # of a chat: role, content, and what else its template writes


@dataclass(frozen=True)
class Sample:
    """One row of training text."""

    place: str  # where it comes from, such as "old.jsonl, line 7"
    content: str | tuple[Message, ...]  # A text, or the messages of a chat
    given: int = 0  # characters or messages at the beginning that are the prompt, of which nothing is learned
    plain: str = ""  # the prompt as plain text, for a tokenizer without a chat template; "" where there is no such form
    tools: tuple[Message, ...] = ()  # the functions that a chat may call, as the template takes them
    ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # tokens of prompt and answer, where the text was written as tokens
    continued: int = 0  # characters at the beginning of the first answer that are given
    muted: frozenset[int] = frozenset()  # places of messages that are read and not learned
    weight: int = 1  # 0: nothing of the row is learned

    @property
    def learned(self) -> tuple[int, ...]:
        """Places of the messages of a chat that are learned: those of the assistant that are neither given nor muted."""
        if isinstance(self.content, str) or not self.weight:
            return ()
        answers = (i for i, message in enumerate(self.content) if message["role"] == "assistant")
        return tuple(i for i in answers if i >= self.given and i not in self.muted)


@dataclass(frozen=True)
class Example:
    """A passage and its label, or a prompt and its answer.

    Args:
        index: Position in the file that it comes from, from 0.
        sentence: The passage, or the prompt as text.
        label: The right label or answer.
        messages: The conversation before the answer, for a tokenizer with a chat template; none for plain text, or where the
            answer begins the chat.
        place: Where it comes from, for messages, such as "new.jsonl, line 7".
        reply: The message of the assistant that is the answer, with all its keys; None where the answer is the label alone.
        tools: The functions that the chat may call.
        ids: Tokens of prompt and answer, where the text was written as tokens.
        learned: Places of earlier messages that are answers themselves.
        continued: Characters at the beginning of the reply that are given.
        lead: What the template writes before the answer's own text, such as an empty thought; known once it is tokenized.

    Example:
        >>> Example(0, "What a day!", "positive").label
        'positive'
    """

    index: int
    sentence: str
    label: str
    messages: tuple[Mapping[str, Any], ...] = ()
    place: str = ""
    reply: Mapping[str, Any] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    learned: tuple[int, ...] = ()
    continued: int = 0
    lead: str = ""

    @property
    def is_answer(self) -> bool:
        """True unless it is plain text: it answers a prompt, or begins a chat."""
        return bool(self.messages or self.sentence) or self.reply is not None


def is_unicode(text: str) -> bool:
    """Tell whether text has no half characters, which no file in UTF-8 can hold."""
    return text.encode(errors="ignore").decode() == text


def examples_of(samples: Iterable[Sample]) -> Iterator[Example]:
    """Yield the examples of rows; of a chat, each message of the assistant answers all before it, as when the model is used."""
    for index, example in enumerate(chain.from_iterable(map(_examples, samples))):
        yield replace(example, index=index)


def _examples(sample: Sample) -> Iterator[Example]:
    content, location, given, learned = sample.content, sample.place, sample.given, sample.learned
    if not sample.weight:
        return
    if sample.ids is not None:
        yield Example(0, "", content if isinstance(content, str) else content[-1]["content"], place=location, ids=sample.ids)
        return
    if isinstance(content, str):
        if content:
            yield Example(0, content[:given], content[given:], place=location)
        return
    for i in learned:
        yield Example(
            0,
            sample.plain,
            content[i]["content"],
            content[:i],
            location,
            reply=content[i],
            tools=sample.tools,
            learned=tuple(earlier for earlier in learned if earlier < i),
            continued=sample.continued if i == given else 0,
        )
