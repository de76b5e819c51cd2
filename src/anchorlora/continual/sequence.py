"""Tasks in order: train one, keep its rows, make cores, test every task so far; one `TaskState` a task.

The sequence writes no file. Whoever drives it takes a state, saves it, and asks for the next; a stopped run goes on from what
was saved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from anchorlora.adapters import Anchor
from anchorlora.constraints.base import end_task
from anchorlora.constraints.checks import refuse_full
from anchorlora.constraints.sensitivity import MEMORY, AnswerSensitivity, memory_in
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.continual.batches import Window, loss_named, windows
from anchorlora.continual.callback import ResumePoint, RunCallback, TaskState, notify
from anchorlora.continual.data import joining, size_of
from anchorlora.continual.evaluate import Scorer
from anchorlora.continual.inputs import RunInputs
from anchorlora.continual.learn import Learner, Rules, learning, rate_at
from anchorlora.continual.progress import Progress, tensors_of
from anchorlora.continual.seeds import dropout_from, stream
from anchorlora.continual.served import SAMPLE, compare
from anchorlora.data import Answer, Encoded, invalid_share, percents
from anchorlora.devices import allocated_at_most
from anchorlora.methods import Method, TaskEnd
from anchorlora.models.packing import rows_at_once
from anchorlora.store.record import TaskResult

Texts = Mapping[str, Mapping[int, str]]


class TaskSequence:
    """One method over the tasks of `inputs`, from the beginning or from where a stopped run goes on."""

    def __init__(
        self,
        inputs: RunInputs,
        method: Method,
        *,
        callbacks: Sequence[RunCallback] = (),
        resume: ResumePoint | None = None,
        check_every: int = CHECK_EVERY,
        leave_last: bool = False,
    ) -> None:
        self.inputs, self.method, self.callbacks, self.check_every = inputs, method, tuple(callbacks), check_every
        self.leave_last = leave_last
        self.base_model, self.recipe, self.data = inputs.base_model, inputs.recipe, inputs.data
        self.order, self.seed, self.blocks, self.processes = self.data.order, self.data.seed, inputs.adapters, inputs.processes
        self.served = inputs.served
        remembers = any(isinstance(part, AnswerSensitivity) for part in method.constraints)
        self.forecast = AnswerSensitivity() if inputs.recipe.trace.predicted_kl and not remembers else None
        self.resume = resume or ResumePoint(inputs.past(method))
        self.past = self.resume.past
        if self.past.tasks:
            factors = {layer: f for layer, f in self.resume.factors.items() if layer not in self.blocks.whole.unread}
            self.method.plan.resume(self.blocks, factors, self.resume.stack)
        else:
            inputs.go_on(method)

    def run(self) -> Generator[TaskState]:
        """Train and test the tasks that are left."""
        reason = self.inputs.unpacked
        if reason is not None and self.recipe.training.batching == "packed":
            padded = f"this model reads no packed rows ({reason}), so examples are padded instead"
            notify(self.callbacks, RunCallback.on_warning, padded)
        if self.resume.untested is not None:
            yield self._tested(self._state(self.resume.untested), self.resume.texts)
        for number in range(self.past.tasks + 1, len(self.order) + 1):
            state = self._state(self._trained(number, self.order[number - 1]))
            notify(self.callbacks, RunCallback.on_task_trained, state)
            yield self._tested(state, {})

    def _trained(self, number: int, name: str) -> TaskResult:
        """Train one task up to its boundary, where cores are made and adapters folded."""
        progress = self.resume.progress
        begun = progress if progress is not None and progress.number == number else None
        first = number == 1 and not self.inputs.old_factors
        self.method.plan.begin_task(self.blocks, stream(self.seed, f"start/{number}"), first=first)
        past, losses = self.past, self.inputs.losses(name)
        anchor = self.blocks.anchor(cores=past.cores, wides=past.wides, past=past.remembered, losses=losses)
        if self.method.preserves.response:
            refuse_full(anchor)
        if begun is not None:
            past.rows.stores = dict(begun.stores)
        began = time.perf_counter() - (begun.seconds if begun else 0.0)
        with past.rows.collect(self.blocks.model, begun.rows if begun else None, processes=self.processes):
            trained = self._learn(number, name, anchor, begun, began)
        notify(self.callbacks, RunCallback.on_steps_end, number, anchor)
        kept = self._remembered(anchor, left=self.leave_last and number == len(self.order))
        train_seconds = time.perf_counter() - began  # with what the method makes of the finished task, as EWC its Fisher
        kept |= self.forecast.end_task(anchor) if self.forecast is not None else {}
        later = number + self.inputs.before > 1
        history = self._history_bytes(number, anchor) if later else 0
        drift = self._drift(anchor) if later and past.cores else None
        cores, kept = past.made(kept, self.processes, provided=self.method.provided_cores)
        draw = stream(self.seed, f"end/{number}")
        self.method.plan.end_task(self.blocks, TaskEnd(past.cores, past.protecting(cores), kept, draw))
        if drift is not None and getattr(self.method.plan, "rewrites", False):
            drift = self._drift(anchor.ending_at(self.blocks.factors()))  # with what the end of the task has changed
        past.append(cores, kept)
        return TaskResult(
            number=number,
            task=name,
            accuracy=[],
            invalid=[],
            drift=drift,
            layers=[
                {"module": layer, "k": c.core.k, "k_star": c.k_star, "retained_energy": c.retained_energy, "rows": c.rows}
                for layer, c in past.last.items()
            ],
            train_seconds=train_seconds,
            evaluate_seconds=0.0,
            peak_memory_bytes=0,
            trained_parameters=trained,
            stored_parameters=sum(f.A.numel() + f.B.numel() for f in self.blocks.factors().values()),
            history_bytes=history,
        )

    def _remembered(self, anchor: Anchor, *, left: bool) -> dict[str, Tensor]:
        """End a task for all constraints and return what they remember; if `left`, the memory of answers stays as it was."""
        kept: dict[str, Tensor] = {}
        for constraint in self.method.constraints:
            reads = isinstance(constraint, AnswerSensitivity)
            kept |= memory_in(anchor.past) if reads and left else end_task(constraint, anchor)
        return kept

    def _drift(self, anchor: Anchor) -> dict[str, Any] | None:
        drifts = (callback.drift(anchor, self.past) for callback in self.callbacks)
        return next((drift for drift in drifts if drift is not None), None)

    def _state(self, result: TaskResult) -> TaskState:
        """The task as it stands after its boundary, without predictions."""
        return TaskState(
            result=result,
            factors=self.blocks.factors(),
            cores=self.past.last,
            rows=self.past.rows.tensors(),
            stores=dict(self.past.rows.stores),
            remembered=dict(self.past.remembered),
            stack=self.method.plan.state(self.blocks),
            fan_in_fan_out=self.blocks.fan_in_fan_out,
            whole=self.blocks.whole,
        )

    def _tested(self, state: TaskState, texts: Texts) -> TaskState:
        began = time.perf_counter() - state.result.evaluate_seconds
        predictions = self._evaluate(state.result.number, texts, began)
        metrics = [percents([a for _, a in pairs]) for pairs in predictions.values()]
        result = replace(
            state.result,
            accuracy=[next(iter(values.values())) for values in metrics],
            metrics=metrics,
            invalid=[invalid_share([a for _, a in pairs], self.data.tasks[name].labels) for name, pairs in predictions.items()],
            evaluate_seconds=time.perf_counter() - began,
            peak_memory_bytes=peak_memory(self.base_model.device),
        )
        state = replace(state, result=result, predictions=predictions)
        notify(self.callbacks, RunCallback.on_task_end, state)
        return state

    def _learn(self, number: int, name: str, anchor: Anchor, begun: Progress | None, began: float) -> int:
        """Train a task, from its beginning or from where it was saved.  Returns how many parameters trained."""
        t, processes, accelerator = self.recipe.training, self.processes, self.inputs.accelerator
        groups = self.method.plan.param_groups(self.blocks)
        optimizer = torch.optim.AdamW(groups, lr=t.learning_rate, betas=t.betas, eps=t.eps, weight_decay=t.weight_decay)
        steps, done = self.recipe.steps(len(self.data.train[name])), begun.step if begun else 0
        notify(self.callbacks, RunCallback.on_task_begin, number, name, steps, done)
        observers = [observer for callback in self.callbacks for observer in callback.observers(number, steps)]
        constraints = [*self.method.at(number + self.inputs.before), *observers]
        # several processes add up their gradients: a wrapper would wait where one has fewer micro-batches
        model = accelerator.prepare_model(self.blocks.model) if processes.count == 1 else self.blocks.model
        learner = Learner(model, accelerator.prepare_optimizer(optimizer), anchor, constraints, accelerator, processes)
        rate = partial(rate_at, schedule=t.schedule, warmup=t.warmup, steps=steps)
        rules = Rules(loss_named(t.loss, t.token_weights), t.clip_norm, rate, self.check_every)
        dropout = f"dropout/{name}/{processes.rank}" if processes.rank else f"dropout/{name}"
        with dropout_from(self.seed, dropout), learning(learner, rules, step=done) as training:
            if begun is not None:
                begun.restore(optimizer, steps=steps, rank=processes.rank)

            def snapshot() -> Progress:
                training.look()  # what is saved is what keeps its promises
                self.blocks.check_history()
                tensors = tensors_of(optimizer, self.past.rows, processes, goes_on=training.number < steps)
                return Progress(number, training.number, time.perf_counter() - began, tensors, dict(self.past.rows.stores))

            for window in islice(self._windows(number, name), done, None):
                event = training.step(window)
                notify(self.callbacks, RunCallback.on_step_end, event)
                self.past.rows.join()
                notify(self.callbacks, RunCallback.on_step_boundary, training.number, snapshot)
            return sum(p.numel() for p in training.trained)

    def _windows(self, number: int, name: str) -> Iterator[Window]:
        """The examples of every optimizer step of a task, with those of its memory."""
        t, examples, pad = self.recipe.training, self.data.train[name], self.base_model.model.generation_config.pad_token_id
        rehearsed = joining(self.method.rehearsal, self.data.memory(self.method.rehearsal, number), self.seed, name)
        row_tokens = t.row_tokens if t.batching == "packed" and self.inputs.unpacked is None else None
        micro = t.micro_batch if row_tokens is not None else rows_at_once(self.blocks.model, t.micro_batch)
        how: dict[str, Any] = {"size": t.window, "micro": micro, "row_tokens": row_tokens, "processes": self.processes}
        for epoch in range(1, t.epochs + 1):
            order = (self.data.shuffled if row_tokens is None else self.data.chats_shuffled)(name, epoch)
            yield from windows(examples, order, pad=pad, rehearsed=rehearsed, **how)

    def _evaluate(self, number: int, texts: Texts, began: float) -> dict[str, list[tuple[Encoded, Answer]]]:
        seen = self.order[:number]
        notify(self.callbacks, RunCallback.on_evaluation_begin, number, sum(len(self.data.test[name]) for name in seen), texts)
        out = {}
        for name in seen:
            known, watch = texts.get(name, {}), partial(self._batch_evaluated, name, began)
            if self.served is not None:
                known = self._served(name, known, watch)
            answers = self._scorer().score(self.data.tasks[name], self.data.test[name], known=known, watch=watch)
            out[name] = list(zip(self.data.test[name], answers, strict=True))
        return out

    def _scorer(self) -> Scorer:
        settings, device = self.recipe.evaluation, self.base_model.device
        how: dict[str, Any] = {"packed": settings.share_prefix and self.inputs.unpacked is None, "processes": self.processes}
        return Scorer.of(self.blocks.model, self.base_model.tokenizer, settings, device=device, **how)

    def _served(self, name: str, known: Mapping[int, str], watch: Callable[[dict[int, str]], None]) -> Mapping[int, str]:
        """Texts of all of a task's examples by vLLM, of which a sample is compared."""
        assert self.served is not None
        e, examples = self.recipe.evaluation, self.data.test[name]
        left = [i for i in range(len(examples)) if i not in known]
        if not left:
            return known
        prompts = [examples[i].prompt for i in left]
        answers = dict(zip(left, self.served.texts(self.blocks.factors(), prompts, max_new_tokens=e.max_new_tokens), strict=True))
        sample = left[:SAMPLE]
        ours = self._scorer().texts([examples[i].prompt for i in sample])
        if (differing := compare(name, ours, [answers[i] for i in sample])) is not None:
            notify(self.callbacks, RunCallback.on_warning, differing)
        watch(answers)
        return {**known, **answers}

    def _batch_evaluated(self, task: str, began: float, texts: dict[int, str]) -> None:
        notify(self.callbacks, RunCallback.on_batch_evaluated, task, texts, time.perf_counter() - began)

    def _history_bytes(self, number: int, anchor: Anchor) -> int:
        """Bytes that the method needs of its past, beside the adapters: rows and cores only where a constraint reads them."""
        required, past = self.method.requires, self.past
        needed = [t for name, t in anchor.past.items() if self.forecast is None or not name.startswith(MEMORY)]
        for kind, kept in (("core", past.cores), ("wide", past.wides)):
            if kind in required:  # layers of one store share their basis
                needed += {id(s.basis): s.basis for s in kept.values()}.values()
        if "start" in required:  # a copy of the adapter as the task found it
            needed += [layer.start_factor(factor) for layer in anchor.layers for factor in ("A", "B")]
        rows = past.rows.core_bytes if {"core", "wide"} & required and self.method.provided_cores is None else 0
        return rows + size_of(self.data.memory(self.method.rehearsal, number)) + sum(t.numel() * t.element_size() for t in needed)


def peak_memory(device: torch.device) -> int:
    """Return the largest memory that this process has taken, in bytes."""
    if allocated := allocated_at_most(device):
        return allocated
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
