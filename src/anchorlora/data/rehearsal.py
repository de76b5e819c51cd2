"""Rehearsal of earlier tasks: which examples are kept, and when one of them joins an optimizer step.

memory  examples of all finished tasks together, an equal number of each (500 / 250+250 / 167+167+166)
share   rehearsed examples per new one: with 0.05 one joins the current step after every 20th new example ("append"), so
        no new example and no step is lost; the step's gradient is the mean over all of its examples

The examples of a task have one fixed random order in which every beginning is stratified by class. The memory is such a beginning,
so it shrinks at later task boundaries without a new draw. (The paper gives memory and share only.)

A holdout of the training data serves for selection before any test file is opened. Within each task and label, the examples are
sorted by SHA-256 of salt | task | text (white space collapsed), and the lowest tenth is held out: the same examples for every seed,
order, method and file order. (The paper says "deterministic 10 %".)
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from anchorlora.data.samples import Example
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from anchorlora.config import TaskSettings
    from anchorlora.data.benchmark import TaskSource


@dataclass(frozen=True)
class Rehearsal:
    """Keep raw examples of earlier tasks and mix some of them into the training of each later task.

    Args:
        memory: Examples kept of all finished tasks together.
        share: Rehearsed examples per new example, in (0, 1].
        learned: Whether their answers are learned again; if not, only constraints such as `Distillation` read them.

    Raises:
        InvalidValue: `memory` is below 1, or `share` is outside (0, 1].

    Example:
        >>> rehearsal = Rehearsal(memory=500, share=0.05)
        >>> rehearsal.quotas(3)
        [167, 167, 166]
        >>> rehearsal.due(40)
        2
    """

    memory: int = 500
    share: float = 0.05
    learned: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.memory < 1 or not 0 < self.share <= 1:
            raise InvalidValue(f"Rehearsal needs a memory of 1 or more and a share in (0, 1], not {self.memory} and {self.share}")

    def quotas(self, tasks: int) -> list[int]:
        """Return how many examples of each finished task are kept; earlier tasks take the remainder.

        Args:
            tasks: Number of finished tasks.
        """
        return [self.memory // tasks + (i < self.memory % tasks) for i in range(tasks)]

    def due(self, seen: int) -> int:
        """Return how many rehearsed examples have joined by a point of an epoch.

        Args:
            seen: New examples of the epoch so far.
        """
        return int(seen * Fraction(str(self.share)))


def stratify(labels: Sequence[str], draw: random.Random) -> list[int]:
    """Return indices in a random order in which every beginning holds the classes in proportion, within one example per class."""
    indices = list(range(len(labels)))
    draw.shuffle(indices)
    classes: dict[str, list[int]] = {}
    for i in indices:
        classes.setdefault(labels[i], []).append(i)
    ranked = [((position + 0.5) / len(members), i) for members in classes.values() for position, i in enumerate(members)]
    return [i for _, i in sorted(ranked, key=lambda pair: pair[0])]


SHARE = 0.1
SALT = "anchorlora holdout 1"


def held_apart(task: str, examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Split the training examples of a task into what is left for training and a holdout."""
    classes: dict[str, list[tuple[str, int]]] = {}
    for index, example in enumerate(examples):
        classes.setdefault(example.label, []).append((_hash(task, example.sentence), index))
    held = sorted(pair for members in classes.values() for pair in sorted(members)[: int(SHARE * len(members) + 0.5)])
    if not held:
        raise InvalidValue(f"{task} has too few training examples to hold {SHARE:.0%} of each label out; raise train_limit")
    chosen = {index for _, index in held}
    return [e for i, e in enumerate(examples) if i not in chosen], [examples[index] for _, index in held]


def read_examples(source: TaskSource, limits: TaskSettings, name: str) -> tuple[Iterable[Example], Iterable[Example]]:
    """Return the training and the test examples of a task, as its settings limit them."""
    train = source.examples(name, "train", limit=limits.train_limit)
    if limits.tested_on == "holdout":
        left, held = held_apart(name, list(train))
        return left, held[: limits.test_limit]
    return train, source.examples(name, "test", limit=limits.test_limit)


def fingerprint(holdouts: dict[str, Sequence[Example]]) -> str:
    """Return one SHA-256 of the held-out examples of all tasks, whatever their order."""
    hashes = sorted(f"{task} {_hash(task, e.sentence)}" for task, held in holdouts.items() for e in held)
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _hash(task: str, sentence: str) -> str:
    return hashlib.sha256(f"{SALT}|{task}|{' '.join(sentence.split())}".encode()).hexdigest()
