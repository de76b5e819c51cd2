"""A holdout of the training data, for choosing before any test file is opened.

Within each task and label the examples are sorted by SHA-256 of salt | task | text (white space collapsed), and the lowest tenth is
held out: the same examples for every seed, order, method and file order. (The paper says "deterministic 10 %".)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from anchorlora.tasks.text import Example

SHARE = 0.1
SALT = "anchorlora holdout 1"


def held_apart(task: str, examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """(what is left for training, in file order; the holdout, by hash).  Raises ValueError when nothing could be held out."""
    classes: dict[str, list[tuple[str, int]]] = {}
    for place, example in enumerate(examples):
        classes.setdefault(example.label, []).append((_hash(task, example.sentence), place))
    held = sorted(pair for mine in classes.values() for pair in sorted(mine)[: int(SHARE * len(mine) + 0.5)])
    if not held:
        raise ValueError(f"{task} has too few training examples to hold {SHARE:.0%} of each label out; raise train_limit")
    places = {place for _, place in held}
    return [e for i, e in enumerate(examples) if i not in places], [examples[place] for _, place in held]


def fingerprint(holdouts: dict[str, Sequence[Example]]) -> str:
    """SHA-256 of the held-out examples of all tasks, whatever their order."""
    hashes = sorted(f"{task} {_hash(task, e.sentence)}" for task, held in holdouts.items() for e in held)
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _hash(task: str, sentence: str) -> str:
    return hashlib.sha256(f"{SALT}|{task}|{' '.join(sentence.split())}".encode()).hexdigest()
