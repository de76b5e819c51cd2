"""Score generated answers: the official normalized exact match, with invalid predictions counted.

Both sides are lowercased, stripped of ASCII punctuation and of extra white space, and compared. Text after the label makes an
answer wrong, and an answer that is no label of the task is invalid. (The official script is `compute_metrics.py`.)
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return text in lower case, without ASCII punctuation, with white space collapsed.

    Args:
        text: Any text.

    Example:
        >>> normalize(" Very  Positive. ")
        'very positive'
    """
    return " ".join(text.lower().translate(_PUNCTUATION).split())


@dataclass(frozen=True)
class Answer:
    """One generated answer.

    Args:
        text: What the model generated.
        label: Label that it means; None for an invalid prediction.
        gold: The right label.

    Example:
        >>> Answer("Positive.", "positive", gold="positive").correct
        True
    """

    text: str
    label: str | None
    gold: str

    @property
    def correct(self) -> bool:
        """True if the label is the right one."""
        return self.label is not None and normalize(self.label) == normalize(self.gold)


def read_answer(text: str, *, gold: str, labels: Sequence[str]) -> Answer:
    """Return the answer that a generated text gives.

    Args:
        text: What the model generated.
        gold: The right label.
        labels: Labels of the task; those that are equal once normalized count as one, as they do officially.

    Example:
        >>> read_answer(" Positive. ", gold="positive", labels=["positive", "negative"]).correct
        True
        >>> read_answer("I think so", gold="positive", labels=["positive", "negative"]).label is None
        True
    """
    said = normalize(text)
    return Answer(text, next((label for label in labels if normalize(label) == said), None), gold)


def accuracy(answers: Sequence[Answer]) -> float:
    """Return the percentage of correct answers.

    Args:
        answers: At least one answer.

    Example:
        >>> accuracy([Answer("yes", "yes", "yes"), Answer("no", "no", "yes")])
        50.0
    """
    return 100 * sum(a.correct for a in answers) / len(answers)


def invalid_share(answers: Sequence[Answer]) -> float:
    """Return the percentage of invalid predictions: answers that are no label of the task.

    Args:
        answers: At least one answer.

    Example:
        >>> invalid_share([Answer("yes", "yes", "yes"), Answer("who knows", None, "yes")])
        50.0
    """
    return 100 * sum(a.label is None for a in answers) / len(answers)
