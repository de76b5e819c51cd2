"""Callbacks of a run over tasks, the state that each task leaves behind, and the point where a stopped run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from anchorlora.adapters import Anchor
from anchorlora.adapters.whole import NO_WHOLE, WholeWeights
from anchorlora.constraints import Constraint
from anchorlora.continual.past import Past
from anchorlora.continual.progress import Progress
from anchorlora.data import Answer, Encoded
from anchorlora.features.store import LayerCore
from anchorlora.geometry import Factors
from anchorlora.store.record import TaskResult

Tell = Callable[[str, int, int], None]  # is told what is done, how much of it, and of how much


@dataclass(frozen=True, eq=False)
class TaskState:
    """Everything that one task left behind: its numbers, and the tensors from which later tasks go on.

    Attributes:
        result: The task's numbers.
        factors: Layer path -> factors of the whole adapter.
        cores: Layer path -> core made at the end of the task.
        rows: The task's feature rows, by kind and store.
        stores: Layer path -> store of its rows.
        remembered: What constraints keep for later tasks.
        stack: What the adapter plan keeps besides the factors.
        fan_in_fan_out: Whether all adapted layers hold their weight as (d_in, d_out), as GPT-2's do.
        whole: Whole weights that the run's first adapter came with.
        predictions: Task so far -> its test examples, in order, with their predictions; empty before the task is tested.
    """

    result: TaskResult
    factors: dict[str, Factors]
    cores: dict[str, LayerCore]
    rows: dict[str, Tensor]
    stores: dict[str, str]
    remembered: dict[str, Tensor]
    stack: dict[str, Tensor]
    fan_in_fan_out: bool = False
    whole: WholeWeights = NO_WHOLE
    predictions: dict[str, list[tuple[Encoded, Answer]]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """The point where a stopped run goes on: after a finished task, within a task, or while a trained task was being tested.

    Attributes:
        past: What the trained tasks left behind.
        factors: Layer path -> factors of the adapter after the last trained task; empty before the first.
        stack: What the adapter plan had kept besides the factors.
        progress: How far the next task is trained, if it had begun.
        untested: The result so far of the last trained task, if it was still being tested.
        texts: Predictions so far for `untested`, by task and index of the example.
    """

    past: Past
    factors: Mapping[str, Factors] = field(default_factory=dict)
    stack: Mapping[str, Tensor] = field(default_factory=dict)
    progress: Progress | None = None
    untested: TaskResult | None = None
    texts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


class RunCallback:
    """Follow a run of tasks: override the moments that matter to you, as with a callback of transformers' Trainer.

    A moment may raise `Interrupted` to stop the run. Callbacks are called in the order in which they are given.

    Example:
        >>> import anchorlora
        >>> from anchorlora.continual.callback import RunCallback
        >>> class Losses(RunCallback):
        ...     def __init__(self):
        ...         self.losses = []
        ...     def on_step_end(self, event):
        ...         self.losses.append(event["loss"])
        >>> callback = Losses()
        >>> callback.on_step_end({"step": 1, "loss": 2.5})
        >>> callback.losses
        [2.5]
    """

    def on_warning(self, message: str) -> None:
        """A saved file was damaged and is passed over.

        Args:
            message: What is wrong with which file, and what is done instead.
        """

    def on_progress(self, what: str, done: int, total: int) -> None:
        """Some of the work before or after training is done: rows are read or encoded, texts are written, or answers are tested.

        Args:
            what: What is done, in words.
            done: Rows, texts or answers so far.
            total: Rows, texts or answers in all.
        """

    def on_task_begin(self, number: int, task: str, steps: int, done: int) -> None:
        """Training of a task begins or goes on.

        Args:
            number: The task's place in the order, from 1.
            task: Its name.
            steps: Optimizer steps of the whole task.
            done: Steps that were made before the run was stopped.
        """

    def on_step_end(self, event: dict[str, Any]) -> None:
        """An optimizer step is done.

        Args:
            event: step, loss, learning_rate, seconds, grad_norm and penalties.
        """

    def on_steps_end(self, number: int, anchor: Anchor) -> None:
        """All optimizer steps of a task are done, and nothing is made of its factors yet: they may still be changed.

        Args:
            number: The task's place in the order, from 1.
            anchor: What the task started from, with the live factors.
        """

    def on_step_boundary(self, step: int, snapshot: Callable[[], Progress]) -> None:
        """The state between two steps can be saved.

        Args:
            step: Optimizer steps of this task so far.
            snapshot: Checks what protects the task and returns a copy of its state.
        """

    def on_task_trained(self, state: TaskState) -> None:
        """A task is trained and its cores are made; it has no predictions yet.

        Args:
            state: What the task left behind so far.
        """

    def on_evaluation_begin(self, number: int, examples: int, texts: Mapping[str, Mapping[int, str]]) -> None:
        """Testing of all tasks so far begins or goes on.

        Args:
            number: Tasks so far.
            examples: Test examples of all of them.
            texts: Predictions from before the run was stopped, by task and index of the example.
        """

    def on_batch_evaluated(self, task: str, texts: Mapping[int, str], seconds: float) -> None:
        """A batch of test examples has predictions.

        Args:
            task: The task that the examples belong to.
            texts: Predictions by index of the example.
            seconds: Seconds of testing so far, over all tasks.
        """

    def on_task_end(self, state: TaskState) -> None:
        """A task is trained and tested.

        Args:
            state: Everything that it left behind.
        """

    def observers(self, number: int, steps: int) -> Sequence[Constraint]:
        """Return constraints that only look at a task, such as a `Trace`; they come after the method's own.

        Args:
            number: The task's place in the order, from 1.
            steps: Optimizer steps of the whole task.

        Returns:
            The observers of this task; none by default.
        """
        return ()

    def drift(self, anchor: Anchor, past: Past) -> dict[str, Any] | None:
        """Measure a task that has just been trained, before it counts as finished.

        Args:
            anchor: The adapted layers as the task found them and as it left them.
            past: What earlier tasks left behind.

        Returns:
            The drift as the record holds it; None, the default, leaves the measuring to another callback.
        """
        return None


def notify(callbacks: Sequence[RunCallback], moment: Callable[..., None], *facts: Any) -> None:
    """Tell callbacks, in order, of a moment of `RunCallback`."""
    for callback in callbacks:
        getattr(callback, moment.__name__)(*facts)
