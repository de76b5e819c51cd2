"""Tasks in order: learn one, keep its rows, make cores, answer every task so far; one `Stage` a task.

The sequence writes no file. Whoever drives it takes a stage, saves it, and asks for the next; a stopped run goes on from the
stages that were saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from anchorlora.adapters import AdapterStack, Anchor
from anchorlora.config import Recipe
from anchorlora.constraints import Constraint
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.continual.batches import LOSSES, Window, example_mean, micro_batch, nobody, windows
from anchorlora.continual.data import TaskData, joining, size_of
from anchorlora.continual.evaluate import ask
from anchorlora.continual.learn import accelerator_on, learn
from anchorlora.continual.past import Past
from anchorlora.continual.progress import Learned, Progress
from anchorlora.continual.seeds import dropout_from, stream
from anchorlora.features.store import LayerCore
from anchorlora.geometry import Factors
from anchorlora.methods import Method
from anchorlora.models.load import LoadedModel
from anchorlora.tasks import Answer, Benchmark, Encoded, Encoder, accuracy, invalid_share

Measure = Callable[[Anchor, Past], dict[str, Any]]


class Autosave:
    """Who saves what stands between two stages.  A moment may save nothing, and may raise Interrupted once it has saved."""

    def between_steps(self, now: Callable[[int], Progress], step: int) -> None:
        """After an optimizer step; `now(step)` gives what stands there, which costs a copy."""

    def learned(self, stage: Stage) -> None:
        """A task is learned, its cores are made, and no answer is asked for yet: the stage has no answers."""

    def answered(self, task: str, texts: dict[int, str], seconds: float) -> None:
        """A batch of the task's examples has been answered, by index; seconds of answering so far, over all tasks."""


class Watch:
    """What a run tells while it runs; every moment may be left alone."""

    def task_begins(self, number: int, task: str, steps: int, done: int) -> None: ...

    def damaged(self, sentence: str) -> None: ...

    def step_done(self, event: dict[str, Any]) -> None: ...

    def evaluation_begins(self, number: int, examples: int) -> None: ...

    def examples_done(self, count: int) -> None: ...

    def task_ends(self, stage: Stage) -> None: ...


@dataclass(frozen=True, eq=False)
class Stage:
    """Everything that one task left behind."""

    number: int  # from 1
    task: str
    factors: dict[str, Factors]  # the whole adapter, by layer
    cores: dict[str, LayerCore]  # made at the end of this task
    rows: dict[str, Tensor]  # this task's feature rows
    stores: dict[str, str]  # adapted layer -> store of its rows
    remembered: dict[str, Tensor]
    stack: dict[str, Tensor]  # what the plan of blocks needs besides the factors
    answers: dict[str, list[tuple[Encoded, Answer]]]  # task so far -> its test examples in order
    drift: dict[str, Any] | None
    train_seconds: float
    evaluate_seconds: float
    trained_parameters: int
    history_bytes: int

    @property
    def accuracy(self) -> list[float]:
        return [accuracy([a for _, a in pairs]) for pairs in self.answers.values()]

    @property
    def invalid(self) -> list[float]:
        return [invalid_share([a for _, a in pairs]) for pairs in self.answers.values()]


@dataclass(eq=False)
class TaskSequence:
    """A run of one method over tasks in order.  Building it reads and tokenizes all data, so that bad data stops it here."""

    base_model: LoadedModel
    benchmark: Benchmark
    recipe: Recipe
    method: Method
    order: Sequence[str]
    seed: int
    measure: Measure
    watch: Watch = field(default_factory=Watch)
    looking: Callable[[int, int], Sequence[Constraint]] = lambda task, steps: ()  # what only looks at a task; added last
    keeper: Autosave = field(default_factory=Autosave)
    check_every: int = CHECK_EVERY  # optimizer steps between two looks at what protects a task
    begun: Progress | None = None  # of the task that is taken up again, if it was being learned
    learned: Learned | None = None  # of the last task of `past`, if it was being answered

    def __post_init__(self) -> None:
        encoder = Encoder(self.base_model.tokenizer, max_tokens=self.recipe.training.max_tokens)
        self.data = TaskData.of(self.benchmark, encoder, self.recipe.tasks, self.order, self.seed)
        adapter = self.recipe.adapter
        self.blocks = AdapterStack(
            self.base_model.model,
            targets=adapter.targets,
            rank=adapter.rank,
            alpha=adapter.alpha,
            rslora=adapter.rslora,
            dropout=adapter.dropout,
            history_dropout=adapter.history_dropout,
        )
        self.past = Past.empty(self.recipe.features, device=self.base_model.device)
        self.accelerator = accelerator_on(self.base_model.device)

    def resume(self, past: Past, factors: Mapping[str, Factors], stack: Mapping[str, Tensor]) -> None:
        """Go on after the last task of `past`, whose adapter is `factors`; stack: what the plan of blocks had kept."""
        self.past = past
        self.method.plan.resume(self.blocks, factors, stack)

    def stages(self) -> Generator[Stage]:
        """Learn the tasks that are left; yields after each of them, when its stage can be saved."""
        if self.learned is not None:
            number = self.past.tasks
            yield self._ended(self._answered(self._stage(number, self.order[number - 1], self.learned), self.learned))
        for number in range(self.past.tasks + 1, len(self.order) + 1):
            learned = self._learned(number, self.order[number - 1])
            stage = self._stage(number, self.order[number - 1], learned)
            self.keeper.learned(stage)
            yield self._ended(self._answered(stage, learned))

    def _ended(self, stage: Stage) -> Stage:
        self.watch.task_ends(stage)
        return stage

    def _learned(self, number: int, name: str) -> Learned:
        """Learn one task up to its boundary, where cores are made and blocks folded."""
        begun = self.begun if self.begun is not None and self.begun.number == number else None
        self.method.plan.begin_task(self.blocks, stream(self.seed, f"start/{number}"), first=number == 1)
        anchor = self.blocks.anchor(
            cores=self.past.cores, wides=self.past.wides, past=self.past.remembered, losses=partial(self.losses, name)
        )
        if begun is not None:
            self.past.rows.stores = dict(begun.stores)
        began = time.perf_counter() - (begun.seconds if begun else 0.0)
        with self.past.rows.collect(self.blocks.model, begun.rows if begun else None):
            trained = self._learn(number, name, anchor, begun, began)
        kept = {key: t for c in self.method.constraints for key, t in c.end_task(anchor).items()}
        train_seconds = time.perf_counter() - began  # with what the method makes of the finished task, as EWC its Fisher
        drift = self.measure(anchor, self.past) if number > 1 else None
        history = self._history_bytes(number, anchor) if number > 1 else 0
        self.past.boundary(kept)
        self.method.plan.end_task(self.blocks)
        return Learned(drift, train_seconds, trained, history, 0.0, {})

    def _stage(self, number: int, name: str, learned: Learned) -> Stage:
        """The task as it stands after its boundary, without answers."""
        return Stage(
            number=number,
            task=name,
            factors=self.blocks.factors(),
            cores=self.past.last,
            rows=self.past.rows.tensors(),
            stores=dict(self.past.rows.stores),
            remembered=dict(self.past.remembered),
            stack=self.method.plan.state(self.blocks),
            answers={},
            drift=learned.drift,
            train_seconds=learned.train_seconds,
            evaluate_seconds=learned.evaluate_seconds,
            trained_parameters=learned.trained_parameters,
            history_bytes=learned.history_bytes,
        )

    def _answered(self, stage: Stage, learned: Learned) -> Stage:
        began = time.perf_counter() - learned.evaluate_seconds
        answers = self._evaluate(stage.number, learned, began)
        return replace(stage, answers=answers, evaluate_seconds=time.perf_counter() - began)

    def _learn(self, number: int, name: str, anchor: Anchor, begun: Progress | None, began: float) -> int:
        t, examples = self.recipe.training, self.data.train[name]
        pad = self.base_model.model.generation_config.pad_token_id
        groups = self.method.plan.param_groups(self.blocks)
        optimizer = torch.optim.AdamW(groups, lr=t.learning_rate, betas=t.betas, eps=t.eps, weight_decay=t.weight_decay)
        rehearsal, memory = self.method.rehearsal, self.data.memory(self.method.rehearsal, number)
        join = joining(rehearsal, memory, self.seed, name) if rehearsal and memory else nobody
        steps, done = self.recipe.steps(len(examples)), begun.step if begun else 0
        self.watch.task_begins(number, name, steps, done)

        def all_windows() -> Iterator[Window]:
            for epoch in range(1, t.epochs + 1):
                order = self.data.shuffled(name, epoch)
                yield from windows(examples, order, size=t.window, micro=t.micro_batch, pad=pad, rehearsed=join)

        def between(step: int, look: Callable[[], None]) -> None:
            def now(step: int) -> Progress:
                look()  # what is saved is what keeps its promises
                self.blocks.check_history()
                seconds = time.perf_counter() - began
                return Progress.of(optimizer, self.past.rows, number=number, step=step, steps=steps, seconds=seconds)

            self.keeper.between_steps(now, step)

        with dropout_from(self.seed, f"dropout/{name}"):
            return learn(
                self.accelerator.prepare_model(self.blocks.model),
                self.accelerator.prepare_optimizer(optimizer),
                anchor,
                [*self.method.at(number), *self.looking(number, steps)],
                islice(all_windows(), done, None),
                loss=LOSSES[t.loss],
                accelerator=self.accelerator,
                clip_norm=t.clip_norm,
                watch=self.watch.step_done,
                step=done,
                restore=partial(begun.restore, optimizer, steps=steps) if begun else lambda: None,
                between=between,
                check_every=self.check_every,
            )

    def losses(self, name: str, count: int) -> Iterator[Tensor]:
        """The loss of each of the task's first `count` examples, in training order, without dropout."""
        model, pad = self.blocks.model, self.base_model.model.generation_config.pad_token_id
        model.eval()
        for i in self.data.shuffled(name, 1)[:count]:
            batch = micro_batch([self.data.train[name][i]], pad=pad).to(self.base_model.device)
            outputs = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
            yield example_mean(outputs.logits, batch, Window((batch,)))

    def _evaluate(self, number: int, learned: Learned, began: float) -> dict[str, list[tuple[Encoded, Answer]]]:
        seen = self.order[:number]
        self.watch.evaluation_begins(number, sum(len(self.data.test[name]) for name in seen))
        self.watch.examples_done(sum(len(texts) for texts in learned.texts.values()))
        e = self.recipe.evaluation
        out = {}
        for name in seen:
            answers = ask(
                self.blocks.model,
                self.base_model.tokenizer,
                self.data.tasks[name],
                self.data.test[name],
                max_new_tokens=e.max_new_tokens,
                batch=e.eval_batch,
                share_prefix=e.share_prefix,
                device=self.base_model.device,
                known=learned.texts.get(name, {}),
                watch=partial(self._batch_answered, name, began),
            )
            out[name] = list(zip(self.data.test[name], answers, strict=True))
        return out

    def _batch_answered(self, task: str, began: float, texts: dict[int, str]) -> None:
        self.watch.examples_done(len(texts))
        self.keeper.answered(task, texts, time.perf_counter() - began)

    def _history_bytes(self, number: int, anchor: Anchor) -> int:
        """Bytes that the method needs of its past, beside the adapters: rows and cores only where a constraint reads them."""
        required, past = self.method.requires, self.past
        needed = list(anchor.past.values())
        for kind, kept in (("core", past.cores), ("wide", past.wides)):
            if kind in required:  # layers of one store share their basis
                needed += {id(s.basis): s.basis for s in kept.values()}.values()
        if "start" in required:  # a copy of the adapter as the task found it
            needed += [layer.start_factor(factor) for layer in anchor.layers for factor in ("A", "B")]
        rows = past.rows.core_bytes if required & {"core", "wide"} else 0
        return rows + size_of(self.data.memory(self.method.rehearsal, number)) + sum(t.numel() * t.element_size() for t in needed)
