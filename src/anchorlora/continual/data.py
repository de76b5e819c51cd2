"""The tasks of a sequence as tokens: what each is trained on, in which order, and what it is tested on.

The memory of rehearsal: raw examples of finished tasks, and which of them joins which optimizer step.

Everything follows from the seed and the training data, so nothing but the data has to be kept for a run that is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import TypeVar

import torch

from anchorlora.config import TaskSettings
from anchorlora.continual.batches import nobody
from anchorlora.continual.callback import Tell
from anchorlora.continual.seeds import draws, stream
from anchorlora.data import (
    AnyTask,
    Encoded,
    EncodedExamples,
    Encoder,
    Rehearsal,
    TaskSource,
    TextFiles,
    TextSource,
    read_examples,
    stratify,
)
from anchorlora.data.sample_files import samples_in
from anchorlora.errors import InvalidValue

OLD_TEXT = "old text"  # where a task's name stands
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TaskData:
    """Everything that a sequence reads, tokenized once."""

    order: tuple[str, ...]  # names of the tasks as they are trained
    seed: int  # the seed of shuffling and of the rehearsal memory
    tasks: dict[str, AnyTask]  # name -> task
    train: dict[str, EncodedExamples]  # name -> training examples
    test: dict[str, EncodedExamples]  # name -> test examples
    old: EncodedExamples | None = None  # text of before the first task

    @classmethod
    def of(
        cls,
        source: TaskSource,
        encoder: Encoder,
        limits: TaskSettings,
        order: Sequence[str],
        seed: int,
        old_text: str | None = None,
        *,
        tell: Tell | None = None,
    ) -> TaskData:
        """Read and tokenize all tasks, reporting progress to `tell` for text files."""
        if repeated := [name for name in order if list(order).count(name) > 1]:
            raise InvalidValue(f"the order names {repeated[0]} twice; a task is trained once")
        old = None
        if old_text is not None:
            reader = partial(samples_in, mixed=True)  # of several kept things
            past = TextFiles({OLD_TEXT: TextSource(old_text, test=old_text, reader=reader)})  # none is held out
            old = encoder.encode(past.task(OLD_TEXT), past.examples(OLD_TEXT, "train"))
        tasks = {name: source.task(name, encoder) if isinstance(source, TextFiles) else source.task(name) for name in order}
        data = cls(tuple(order), seed, tasks, {}, {}, old)
        for name, task in data.tasks.items():
            if isinstance(source, TextFiles) and limits.tested_on == "test":
                bars = [partial(tell, f"encoding {name}: {part}") if tell else None for part in ("training", "test")]
                data.train[name] = source.encoded(name, "train", encoder, limit=limits.train_limit, tell=bars[0])
                data.test[name] = source.encoded(name, "test", encoder, limit=limits.test_limit, tell=bars[1])
            else:
                train, test = read_examples(source, limits, name)
                data.train[name], data.test[name] = encoder.encode(task, train), encoder.encode(task, test)
        return data

    def shuffled(self, name: str, epoch: int) -> list[int]:
        """Return the order in which an epoch goes through a task's training examples."""
        return torch.randperm(len(self.train[name]), generator=stream(self.seed, f"order/{name}/{epoch}")).tolist()

    def chats_shuffled(self, name: str, epoch: int) -> list[int]:
        """Return the same order, but of whole chats, whose turns are trained together: a packed row reads them once."""
        begins = [*self.train[name].begins, len(self.train[name])]
        order = torch.randperm(len(begins) - 1, generator=stream(self.seed, f"order/{name}/{epoch}")).tolist()
        return [i for chat in order for i in range(begins[chat], begins[chat + 1])]

    def sample(self) -> list[tuple[int, ...]]:
        """Return the tokens of the longest of all examples and of two of the first task, prompt and answer."""
        every = [*self.train.values(), *self.test.values()]
        most = max(every, key=lambda examples: max(examples.lengths, default=0))
        return [longest_first(most)[0], *longest_first(self.train[self.order[0]])[1:]]

    def longest(self, max_new_tokens: int) -> int:
        """Return the most tokens that the model reads at once, with those that it generates."""
        new = {name: (task.max_new_tokens or max_new_tokens) if task.answered else 0 for name, task in self.tasks.items()}
        trained = max(max(examples.lengths, default=0) for examples in self.train.values())
        return max(trained, *(max(examples.lengths, default=0) + new[name] for name, examples in self.test.items()))

    def memory(self, rehearsal: Rehearsal | None, number: int) -> list[Encoded]:
        """Return what rehearsal may draw on while a task is trained."""
        before = {} if self.old is None else {OLD_TEXT: self.old}
        finished = before | {name: self.train[name] for name in self.order[: number - 1]}
        return remember(rehearsal, finished, self.seed)


def longest_first(examples: EncodedExamples) -> list[tuple[int, ...]]:
    """Return the tokens of the longest example and of the first two, prompt and answer."""
    longest = max(range(len(examples)), key=examples.lengths.__getitem__)
    return [e.prompt + e.answer for e in (examples[longest], *examples[:2])]


def remember(rehearsal: Rehearsal | None, finished: Mapping[str, EncodedExamples], seed: int) -> list[Encoded]:
    """Return the memory after the finished tasks, each part stratified by class; none without rehearsal."""
    kept: list[Encoded] = []
    if rehearsal is None:
        return kept
    for quota, (name, examples) in zip(rehearsal.quotas(len(finished)), finished.items(), strict=True):
        order = stratify(examples.labels, draws(seed, f"memory/{name}"))
        kept += [replace(examples[i], remembered=True, learned=rehearsal.learned) for i in order[:quota]]
    return kept


def joining(
    rehearsal: Rehearsal | None, memory: Sequence[Encoded], seed: int, task: str
) -> Callable[[int, int], Sequence[Encoded]]:
    """Return the `rehearsed` of `windows`: it cycles through the memory in a random order of the task's own, no example twice per
    cycle.
    """
    if rehearsal is None:
        return nobody
    order = list(memory)
    draws(seed, f"rehearsal/{task}").shuffle(order)
    endless = cycle(order)
    return lambda start, end: list(islice(endless, rehearsal.due(end) - rehearsal.due(start)))


def size_of(memory: Sequence[Encoded]) -> int:
    """Return the bytes of a memory as text: prompts and labels."""
    return sum(len(e.text.encode()) + len(e.example.label.encode()) for e in memory)
