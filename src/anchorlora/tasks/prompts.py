"""Prompts as text and as tokens.

    Task:<group>\\nDataset:<name>\\n<instruction>Option: <l1>, <l2>, ... \\n<sentence>\\nAnswer:      then <label><end of sequence>

Byte-equal to the official O-LoRA prompts (OLORA_FACTS 1.3). Prompt and label are tokenized apart, in training and in
evaluation alike, so the model is asked with exactly the tokens that it was taught with. Where a prompt is too long the
passage is cut, never the answer cue nor the label; room is kept for the longest label, so both uses cut alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anchorlora.errors import InvalidValue

CUE = "\nAnswer:"


@dataclass(frozen=True)
class Task:
    """One classification task: its group ("TC"), name ("agnews"), instruction (ends in a newline) and labels in file order."""

    group: str
    name: str
    instruction: str
    labels: tuple[str, ...]

    def head(self) -> str:
        """Everything before the passage."""
        options = f"Option: {', '.join(self.labels)} \n" if self.instruction else ""  # the official COPA prompt has neither
        return f"Task:{self.group}\nDataset:{self.name}\n{self.instruction}{options}"

    def prompt(self, sentence: str) -> str:
        """The whole prompt, ending in the answer cue."""
        return self.head() + sentence + CUE


@dataclass(frozen=True)
class Example:
    """A passage and its label, with its index in the file it came from."""

    index: int
    sentence: str
    label: str


@dataclass(frozen=True)
class Encoded:
    """One example as token ids: `prompt`, then `answer` (label and end of sequence).  `text`: the prompt that was tokenized."""

    example: Example
    text: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cut: bool

    @property
    def prompt_sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Encoder:
    """Turns a task's examples into tokens with any Hugging Face tokenizer that has an end-of-sequence token.

    max_tokens bounds prompt and answer together.
    """

    def __init__(self, tokenizer: Any, *, max_tokens: int) -> None:
        if tokenizer.eos_token_id is None:
            raise InvalidValue("this tokenizer has no end-of-sequence token, and answers are taught to end with it; set eos_token")
        self.tokenizer, self.max_tokens, self.end = tokenizer, max_tokens, int(tokenizer.eos_token_id)

    def encode(self, task: Task, examples: Sequence[Example]) -> list[Encoded]:
        answers = {label: self._answer(label) for label in task.labels}
        room = self.max_tokens - max(len(ids) for ids in answers.values())
        empty = len(self._prompt(task.prompt("")))
        if empty > room:
            raise InvalidValue(
                f"the prompt of {task.name} takes {empty} tokens without its passage and {self.max_tokens - room} are kept for the "
                f"label, but max_tokens is {self.max_tokens}; raise max_tokens"
            )
        return [self._one(task, example, answers, room) for example in examples]

    def _one(self, task: Task, example: Example, answers: dict[str, tuple[int, ...]], room: int) -> Encoded:
        text = task.prompt(example.sentence)
        ids = self._prompt(text)
        cut = len(ids) > room
        if cut:
            kept = longest(len(example.sentence), lambda n: len(self._prompt(task.prompt(example.sentence[:n]))) <= room)
            text = task.prompt(example.sentence[:kept])
            ids = self._prompt(text)
        answer = answers.get(example.label) or self._answer(example.label)
        return Encoded(example, text, ids, answer, cut)

    def _prompt(self, text: str) -> tuple[int, ...]:
        """With the tokenizer's own beginning-of-sequence token, if it adds one, but never with an end."""
        ids = list(self.tokenizer(text).input_ids)
        while ids and ids[-1] == self.end:
            ids.pop()
        return tuple(ids)

    def _answer(self, label: str) -> tuple[int, ...]:
        return (*self.tokenizer(label, add_special_tokens=False).input_ids, self.end)


def longest(size: int, fits: Callable[[int], bool]) -> int:
    """The largest n <= size with fits(n), by bisection.  More characters may now and then take fewer tokens; then a
    neighboring n that fits is found instead."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
