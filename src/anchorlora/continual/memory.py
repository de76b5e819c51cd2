"""The memory of rehearsal: raw examples of finished tasks, and which of them joins which optimizer step.

Everything follows from the seed and the training data, so nothing but the data has to be kept for a run that is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice

from anchorlora.continual.seeds import draws
from anchorlora.tasks import Encoded, Rehearsal, stratified


def remembered(rehearsal: Rehearsal, finished: Mapping[str, Sequence[Encoded]], seed: int) -> list[Encoded]:
    """The memory after the finished tasks, task by task, each part stratified by class."""
    kept = []
    for quota, (name, examples) in zip(rehearsal.quotas(len(finished)), finished.items(), strict=True):
        order = stratified([e.example.label for e in examples], draws(seed, f"memory/{name}"))
        kept += [examples[i] for i in order[:quota]]
    return kept


def joining(rehearsal: Rehearsal, memory: Sequence[Encoded], seed: int, task: str) -> Callable[[int, int], list[Encoded]]:
    """For `windows`: cycles through the memory in a random order of the task's own, without replacement within a cycle."""
    order = list(memory)
    draws(seed, f"rehearsal/{task}").shuffle(order)
    endless = cycle(order)
    return lambda start, end: list(islice(endless, rehearsal.due(end) - rehearsal.due(start)))


def size_of(memory: Sequence[Encoded]) -> int:
    """Bytes of the memory as text: prompts and labels."""
    return sum(len(e.text.encode()) + len(e.example.label.encode()) for e in memory)
