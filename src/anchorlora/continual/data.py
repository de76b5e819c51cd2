"""The tasks of a sequence as tokens: what each is learned from, in which order, and what it is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anchorlora.continual.memory import remembered
from anchorlora.continual.recipe import Tasks
from anchorlora.continual.seeds import stream
from anchorlora.tasks import Benchmark, Encoded, Encoder, Example, Rehearsal, Task, held_apart


@dataclass(frozen=True, eq=False)
class TaskData:
    """Everything that a sequence reads, tokenized once; `order` names the tasks as they are learned."""

    order: tuple[str, ...]
    seed: int
    tasks: dict[str, Task]
    train: dict[str, list[Encoded]]
    test: dict[str, list[Encoded]]

    @classmethod
    def of(cls, benchmark: Benchmark, encoder: Encoder, limits: Tasks, order: Sequence[str], seed: int) -> TaskData:
        repeated = [name for name in order if list(order).count(name) > 1]
        if repeated:
            raise ValueError(f"the order names {repeated[0]} twice; a task is learned once")
        data = cls(tuple(order), seed, {name: benchmark.task(name) for name in order}, {}, {})
        for name, task in data.tasks.items():
            train, test = _examples(benchmark, limits, name)
            data.train[name], data.test[name] = encoder.encode(task, train), encoder.encode(task, test)
        return data

    def shuffled(self, name: str, epoch: int) -> list[int]:
        """The order in which an epoch (from 1) goes through a task's training examples."""
        return torch.randperm(len(self.train[name]), generator=stream(self.seed, f"order/{name}/{epoch}")).tolist()

    def memory(self, rehearsal: Rehearsal | None, number: int) -> list[Encoded]:
        """What rehearsal may draw on while task `number` (from 1) is learned."""
        finished = {name: self.train[name] for name in self.order[: number - 1]}
        return remembered(rehearsal, finished, self.seed) if rehearsal and finished else []


def _examples(benchmark: Benchmark, limits: Tasks, name: str) -> tuple[list[Example], list[Example]]:
    train = benchmark.examples(name, "train", limit=limits.train_limit)
    if limits.tested_on == "holdout":
        train, held = held_apart(name, train)
        return train, held[: limits.test_limit]
    return train, benchmark.examples(name, "test", limit=limits.test_limit)
