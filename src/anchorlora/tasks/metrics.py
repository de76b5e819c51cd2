"""Reading a generated answer: the official normalised exact match, with illegal labels counted.

Lower case, ASCII punctuation dropped, white space collapsed on both sides; then string equality. Text after the label makes
an answer wrong, and an answer that is no label of the task at all is illegal. (The official script is `compute_metrics.py`.)
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    return " ".join(text.lower().translate(_PUNCTUATION).split())


@dataclass(frozen=True)
class Answer:
    """What the model said, the label it means (None: illegal), and whether that is the right one."""

    text: str
    label: str | None
    gold: str

    @property
    def correct(self) -> bool:
        return self.label is not None and normalise(self.label) == normalise(self.gold)


def read_answer(text: str, *, gold: str, labels: Sequence[str]) -> Answer:
    """The answer that `text` gives.  Labels that normalise alike count as one, as they do officially."""
    said = normalise(text)
    return Answer(text, next((label for label in labels if normalise(label) == said), None), gold)


def accuracy(answers: Sequence[Answer]) -> float:
    """Percent of correct answers."""
    return 100 * sum(a.correct for a in answers) / len(answers)


def illegal_share(answers: Sequence[Answer]) -> float:
    """Percent of answers that are no label of the task."""
    return 100 * sum(a.label is None for a in answers) / len(answers)
