"""Reading a generated answer: the official normalized exact match, with invalid labels counted.

Lower case, ASCII punctuation dropped, white space collapsed on both sides; then string equality. Text after the label makes
an answer wrong, and an answer that is no label of the task at all is invalid. (The official script is `compute_metrics.py`.)
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    return " ".join(text.lower().translate(_PUNCTUATION).split())


@dataclass(frozen=True)
class Answer:
    """What the model said, the label it means (None: invalid), and whether that is the right one."""

    text: str
    label: str | None
    gold: str

    @property
    def correct(self) -> bool:
        return self.label is not None and normalize(self.label) == normalize(self.gold)


def read_answer(text: str, *, gold: str, labels: Sequence[str]) -> Answer:
    """The answer that `text` gives.  Labels that normalize alike count as one, as they do officially."""
    said = normalize(text)
    return Answer(text, next((label for label in labels if normalize(label) == said), None), gold)


def accuracy(answers: Sequence[Answer]) -> float:
    """Percent of correct answers."""
    return 100 * sum(a.correct for a in answers) / len(answers)


def invalid_share(answers: Sequence[Answer]) -> float:
    """Percent of answers that are no label of the task."""
    return 100 * sum(a.label is None for a in answers) / len(answers)
