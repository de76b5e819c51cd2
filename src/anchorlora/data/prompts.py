r"""Prompts as text and as tokens.

    Task:<group>\nDataset:<name>\n<instruction>Option: <l1>, <l2>, ... \n<sentence>\nAnswer:      then <label><end of sequence>

Byte-equal to the official O-LoRA prompts (OLORA_FACTS 1.3). Prompt and label are tokenized separately, in training and in
evaluation, so the model is evaluated on exactly the tokens that it was trained on. A prompt that is too long loses the end of its
passage, never the answer cue or the label; room is kept for the longest label, so training and evaluation cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from anchorlora.data.metrics import Answer, ExactMatch, Metric, read_answer, score_answer
from anchorlora.data.samples import Example, is_unicode
from anchorlora.data.spool import Encoded, EncodedExamples
from anchorlora.data.templates import stop_ids
from anchorlora.errors import InvalidValue

CUE = "\nAnswer:"


class Encodable(Protocol):
    """A task as tokens: `Task` for classification in the official prompts, `TextTask` for everything else."""

    def encoded(self, encoder: Encoder, examples: Iterable[Example]) -> Iterator[Encoded]:
        """Yield examples as tokens."""


@dataclass(frozen=True)
class Task:
    r"""One classification task.

    Args:
        group: Group of the task, such as "TC" for text classification.
        name: Name of the task, such as "agnews".
        instruction: Instruction, ending in a newline; "" leaves out the options too.
        labels: Labels, in file order.
        metrics: What answers are scored by, the primary metric first.
        max_new_tokens: Most tokens of an answer; None for what the recipe says.

    Example:
        >>> task = Task("TC", "mood", "Is the mood positive or negative?\n", ("positive", "negative"))
        >>> task.prompt("What a day!").splitlines()[-2:]
        ['What a day!', 'Answer:']
    """

    group: str
    name: str
    instruction: str
    labels: tuple[str, ...]
    metrics: tuple[Metric, ...] = (ExactMatch(),)
    max_new_tokens: int | None = None

    @property
    def answered(self) -> bool:
        """True: a label is generated for every example."""
        return True

    def head(self) -> str:
        """Return everything before the passage."""
        options = f"Option: {', '.join(self.labels)} \n" if self.instruction else ""  # the official COPA prompt has neither
        return f"Task:{self.group}\nDataset:{self.name}\n{self.instruction}{options}"

    def prompt(self, sentence: str) -> str:
        """Return the whole prompt, ending in the answer cue.

        Args:
            sentence: The passage.
        """
        return self.head() + sentence + CUE

    def answer(self, text: str, example: Example) -> Answer:
        """Return what a generated text answers, with its scores.

        Args:
            text: What the model generated.
            example: The example that it answers.
        """
        return score_answer(read_answer(text, gold=example.label, labels=self.labels), example, self.metrics)

    def _shortened(self, encoder: Encoder, sentence: str, room: int) -> str:
        kept = longest(len(sentence), lambda n: len(encoder.prompt(self.prompt(sentence[:n]))) <= room)
        return self.prompt(sentence[:kept])

    def encoded(self, encoder: Encoder, examples: Iterable[Example]) -> Iterator[Encoded]:
        """Yield examples as tokens; a passage that is too long loses its end.

        Args:
            encoder: Has the tokenizer and the room.
            examples: Examples of the task.

        Raises:
            InvalidValue: The prompt does not fit even without its passage.
        """
        answers = {label: encoder.answer(label) for label in self.labels}
        room = encoder.max_tokens - max(len(ids) for ids in answers.values())
        empty = len(encoder.prompt(self.prompt("")))
        if empty > room:
            raise InvalidValue(
                f"the prompt of {self.name} takes {empty} tokens without its passage and {encoder.max_tokens - room} are kept for "
                f"the label, but max_tokens is {encoder.max_tokens}; raise max_tokens"
            )
        for example in examples:
            text = self.prompt(example.sentence)
            ids = encoder.prompt(text)
            cut = len(ids) > room
            if cut:
                text = self._shortened(encoder, example.sentence, room)
                ids = encoder.prompt(text)
            answer = answers.get(example.label) or encoder.answer(example.label)
            encoder.refuse_outside([*ids, *answer], self.name)
            yield Encoded(example, text, ids, answer, cut)


class Encoder:
    """Turn the examples of a task into tokens, at most `max_tokens` of prompt and answer together.

    `end` ends an answer that is not a chat's. A server stops at each of `stops`: `end`, `ends`, and what the chat template writes.
    """

    def __init__(
        self, tokenizer: Any, *, max_tokens: int, ends: Iterable[int] = (), size: int | None = None, positions: int | None = None
    ) -> None:
        if not is_unicode(tokenizer.eos_token or ""):
            raise InvalidValue("the tokenizer ends text with characters that are not Unicode text; fetch the tokenizer again")
        if tokenizer.eos_token_id is None:
            raise InvalidValue("this tokenizer has no end-of-sequence token, and answers must end with it; set eos_token")
        self.tokenizer, self.max_tokens, self.end = tokenizer, max_tokens, int(tokenizer.eos_token_id)
        self.stops, self.size, self.positions = stop_ids(tokenizer, ends), size, positions  # how many the model has

    def refuse_outside(self, ids: Sequence[int], location: str) -> None:
        """Refuse a token that the model does not have, as after adding tokens to a tokenizer alone, or a position."""
        if self.positions is not None and (tokens := min(len(ids), self.max_tokens)) > self.positions:
            raise InvalidValue(
                f"{location}: {tokens} tokens, and the model has {self.positions} positions; set max_tokens={self.positions} "
                "(--max-length of train), which cuts longer rows"
            )
        if self.size is not None and (last := max(ids, default=0)) >= self.size:
            token = self.tokenizer.convert_ids_to_tokens(last)
            raise InvalidValue(
                f"{location}: the token {token!r} has number {last}, and the model has {self.size} tokens; give the tokenizer that "
                "belongs to it, or enlarge the model (resize_token_embeddings) and save it"
            )

    @property
    def key(self) -> tuple[Any, ...]:
        """All of an encoder that the tokens of an example depend on."""
        of = self.tokenizer
        return (type(of), of.name_or_path, len(of), str(of.chat_template), self.max_tokens, self.end, self.stops)

    def encode(self, task: Encodable, examples: Iterable[Example]) -> EncodedExamples:
        """Return the examples of a task as tokens, in order."""
        return EncodedExamples(task.encoded(self, examples))

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """The tokens that the tokenizer adds before a text."""
        alone, read = (list(self.tokenizer("a", add_special_tokens=special, verbose=False).input_ids) for special in (False, True))
        return tuple(next((read[:at] for at in range(len(read)) if read[at : at + len(alone)] == alone), []))

    def begins(self, text: str) -> bool:
        """Return True if a text begins with what the tokenizer would add before it, as rendered text often does."""
        written = "".join(self.tokenizer.convert_ids_to_tokens(list(self.beginning)))
        return bool(written) and text.startswith(written)

    def prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the tokenizer's own beginning once, if it adds one, and without an end."""
        ids = list(self.tokenizer(text, add_special_tokens=not self.begins(text), verbose=False).input_ids)
        while ids and ids[-1] == self.end:
            ids.pop()
        return tuple(ids)

    def answer(self, text: str) -> tuple[int, ...]:
        """Return the tokens of an answer and the end of sequence."""
        return (*self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids, self.end)


def longest(size: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n <= size with fits(n), by bisection; where fewer do not always fit, a neighboring one."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
