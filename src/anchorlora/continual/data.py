"""The tasks of a sequence as tokens: what each is trained on, in which order, and what it is tested on.

The memory of rehearsal: raw examples of finished tasks, and which of them joins which optimizer step.

Everything follows from the seed and the training data, so nothing but the data has to be kept for a run that is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from anchorlora.config import TaskSettings
from anchorlora.continual.seeds import draws, stream
from anchorlora.errors import InvalidValue
from anchorlora.tasks import AnyTask, Encoded, EncodedExamples, Encoder, Rehearsal, TaskSource, read_examples, stratified


@dataclass(frozen=True, eq=False)
class TaskData:
    """Everything that a sequence reads, tokenized once.

    Attributes:
        order: Names of the tasks as they are trained.
        seed: The seed of shuffling and of the rehearsal memory.
        tasks: Name -> task.
        train: Name -> training examples.
        test: Name -> test examples.
    """

    order: tuple[str, ...]
    seed: int
    tasks: dict[str, AnyTask]
    train: dict[str, EncodedExamples]
    test: dict[str, EncodedExamples]

    @classmethod
    def of(cls, source: TaskSource, encoder: Encoder, limits: TaskSettings, order: Sequence[str], seed: int) -> TaskData:
        """Read and tokenize all tasks.

        Args:
            source: Where the tasks come from.
            encoder: Makes tokens of examples.
            limits: How many examples to read, and which part to test on.
            order: Names of the tasks as they are trained.
            seed: The seed of shuffling and of the rehearsal memory.

        Raises:
            ValueError: A task is named twice, is unknown, or has a file that cannot be read.
        """
        repeated = [name for name in order if list(order).count(name) > 1]
        if repeated:
            raise InvalidValue(f"the order names {repeated[0]} twice; a task is trained once")
        data = cls(tuple(order), seed, {name: source.task(name) for name in order}, {}, {})
        for name, task in data.tasks.items():
            train, test = read_examples(source, limits, name)
            data.train[name], data.test[name] = encoder.encode(task, train), encoder.encode(task, test)
        return data

    def shuffled(self, name: str, epoch: int) -> list[int]:
        """Return the order in which an epoch goes through a task's training examples.

        Args:
            name: The task.
            epoch: Counts from 1.

        Returns:
            Indices of training examples.
        """
        return torch.randperm(len(self.train[name]), generator=stream(self.seed, f"order/{name}/{epoch}")).tolist()

    def sample(self) -> list[tuple[int, ...]]:
        """Return the tokens of the longest of all examples and of two of the first task, prompt and answer."""
        every = [*self.train.values(), *self.test.values()]
        most = max(every, key=lambda examples: max(examples.lengths, default=0))
        return [longest_first(most)[0], *longest_first(self.train[self.order[0]])[1:]]

    def longest(self, max_new_tokens: int) -> int:
        """Return the most tokens that the model reads at once, with those that it generates.

        Args:
            max_new_tokens: Tokens generated for an answer, unless the task says otherwise.
        """
        new = {name: (task.max_new_tokens or max_new_tokens) if task.answered else 0 for name, task in self.tasks.items()}
        trained = max(max(examples.lengths, default=0) for examples in self.train.values())
        return max(trained, *(max(examples.lengths, default=0) + new[name] for name, examples in self.test.items()))

    def memory(self, rehearsal: Rehearsal | None, number: int) -> list[Encoded]:
        """Return what rehearsal may draw on while a task is trained.

        Args:
            rehearsal: The method's rehearsal; None for a method without one.
            number: The task's place in the order, from 1.

        Returns:
            Examples of earlier tasks; none for the first task.
        """
        finished = {name: self.train[name] for name in self.order[: number - 1]}
        return remembered(rehearsal, finished, self.seed) if rehearsal and finished else []


def longest_first(examples: EncodedExamples) -> list[tuple[int, ...]]:
    """Return the tokens of the longest example and of the first two, prompt and answer.

    Args:
        examples: At least one example.
    """
    longest = max(range(len(examples)), key=examples.lengths.__getitem__)
    return [e.prompt + e.answer for e in (examples[longest], *examples[:2])]


def remembered(rehearsal: Rehearsal, finished: Mapping[str, EncodedExamples], seed: int) -> list[Encoded]:
    """Return the memory after the finished tasks, each part stratified by class.

    Args:
        rehearsal: How many examples of each task to keep.
        finished: Task -> its training examples, in the order of training.
        seed: The seed of the draws.

    Returns:
        The examples in memory, task by task.
    """
    kept = []
    for quota, (name, examples) in zip(rehearsal.quotas(len(finished)), finished.items(), strict=True):
        order = stratified(examples.labels, draws(seed, f"memory/{name}"))
        kept += [examples[i] for i in order[:quota]]
    return kept


def joining(rehearsal: Rehearsal, memory: Sequence[Encoded], seed: int, task: str) -> Callable[[int, int], list[Encoded]]:
    """Return the `rehearsed` of `windows`: it cycles through the memory in a random order of the task's own.

    Within a cycle no example comes twice.

    Args:
        rehearsal: How many remembered examples join how many new ones.
        memory: The examples in memory; at least one.
        seed: The seed of the order.
        task: The task that is trained.

    Returns:
        A function from the indices of a window's new examples to the remembered ones that join them.
    """
    order = list(memory)
    draws(seed, f"rehearsal/{task}").shuffle(order)
    endless = cycle(order)
    return lambda start, end: list(islice(endless, rehearsal.due(end) - rehearsal.due(start)))


def size_of(memory: Sequence[Encoded]) -> int:
    """Return the bytes of a memory as text: prompts and labels.

    Args:
        memory: The examples in memory.
    """
    return sum(len(e.text.encode()) + len(e.example.label.encode()) for e in memory)
