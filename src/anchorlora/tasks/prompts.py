r"""Prompts as text and as tokens.

    Task:<group>\nDataset:<name>\n<instruction>Option: <l1>, <l2>, ... \n<sentence>\nAnswer:      then <label><end of sequence>

Byte-equal to the official O-LoRA prompts (OLORA_FACTS 1.3). Prompt and label are tokenized separately, in training and in
evaluation, so the model is evaluated on exactly the tokens that it was trained on. A prompt that is too long loses the end of its
passage, never the answer cue or the label; room is kept for the longest label, so training and evaluation cut alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.tasks.metrics import Answer, ExactMatch, Metric, read_answer, scored
from anchorlora.tasks.spool import EncodedExamples

CUE = "\nAnswer:"


@dataclass(frozen=True)
class Task:
    r"""One classification task.

    Args:
        group: Group of the task, such as "TC" for text classification.
        name: Name of the task, such as "agnews".
        instruction: Instruction, ending in a newline; "" leaves out the options too.
        labels: Labels, in file order.
        metrics: What answers are scored by, the primary metric first.

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
        return scored(read_answer(text, gold=example.label, labels=self.labels), example, self.metrics)


@dataclass(frozen=True)
class Example:
    """A passage and its label.

    Args:
        index: Position in the file that it comes from, from 0.
        sentence: The passage.
        label: The right label.

    Example:
        >>> Example(0, "What a day!", "positive").label
        'positive'
    """

    index: int
    sentence: str
    label: str


@dataclass(frozen=True)
class Encoded:
    """One example as token ids.

    Args:
        example: The example.
        text: The prompt that was tokenized.
        prompt: Tokens of the prompt.
        answer: Tokens of the label and the end of sequence.
        cut: True if the passage was cut to fit.
    """

    example: Example
    text: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cut: bool

    @property
    def prompt_sha256(self) -> str:
        """SHA-256 of the prompt's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


class Encoder:
    r"""Turn the examples of a task into tokens.

    Args:
        tokenizer: A Hugging Face tokenizer with an end-of-sequence token.
        max_tokens: Largest number of tokens of prompt and answer together.

    Raises:
        InvalidValue: The tokenizer has no end-of-sequence token.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from anchorlora.embedded import folder
        >>> encoder = Encoder(AutoTokenizer.from_pretrained(folder("embedded:mini", "base_model")), max_tokens=64)
        >>> task = Task("TC", "mood", "Is the mood positive or negative?\n", ("positive", "negative"))
        >>> encoded = encoder.encode(task, [Example(0, "What a day!", "positive")])[0]
        >>> encoded.cut, encoded.answer[-1] == encoder.end
        (False, True)
    """

    def __init__(self, tokenizer: Any, *, max_tokens: int) -> None:
        if tokenizer.eos_token_id is None:
            raise InvalidValue("this tokenizer has no end-of-sequence token, and answers must end with it; set eos_token")
        self.tokenizer, self.max_tokens, self.end = tokenizer, max_tokens, int(tokenizer.eos_token_id)

    def encode(self, task: Task, examples: Iterable[Example]) -> EncodedExamples:
        """Return the examples of a task as tokens, in order.

        Args:
            task: The task.
            examples: Its examples, read one after the other.

        Raises:
            InvalidValue: The prompt does not fit into `max_tokens` even without its passage.
        """
        answers = {label: self._answer(label) for label in task.labels}
        room = self.max_tokens - max(len(ids) for ids in answers.values())
        empty = len(self._prompt(task.prompt("")))
        if empty > room:
            raise InvalidValue(
                f"the prompt of {task.name} takes {empty} tokens without its passage and {self.max_tokens - room} are kept for the "
                f"label, but max_tokens is {self.max_tokens}; raise max_tokens"
            )
        return EncodedExamples(self._one(task, example, answers, room) for example in examples)

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
    """Return the largest n <= size with fits(n), by bisection.

    More characters may now and then take fewer tokens; a neighboring n that fits is found then.

    Args:
        size: Upper limit.
        fits: True for every n up to the answer.

    Example:
        >>> longest(100, lambda n: n * n <= 50)
        7
    """
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
