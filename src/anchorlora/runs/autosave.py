"""Saving between two tasks: every so many steps, when a task is trained, while it is tested, and when the run is asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from anchorlora.continual.callback import RunCallback, TaskState
from anchorlora.continual.progress import Progress
from anchorlora.errors import Interrupted
from anchorlora.processes import ALONE, Processes
from anchorlora.runs.directory import RunDirectory
from anchorlora.runs.record import now

ANSWERS_EVERY = 30.0  # seconds


class Stop:
    """A request to stop, made by a signal and read between two steps."""

    def __init__(self) -> None:
        self.why: str | None = None
        self.training = False
        self.leaving: Callable[[], None] = lambda: None

    def ask(self, why: str) -> None:
        """Ask the run to save and stop at the next step or batch."""
        self.why = why


class Stopping(RunCallback):
    """Stop all processes of a run together when one of them is asked to, where the run can go on; save nothing."""

    def __init__(self, *, every: int, stop: Stop, processes: Processes = ALONE) -> None:
        self.every, self.stop, self.processes, self.number = every, stop, processes, 0

    def on_task_begin(self, number: int, task: str, steps: int, done: int) -> None:
        """Note the task."""
        self.number = number

    def on_step_boundary(self, step: int, snapshot: Callable[[], Progress]) -> None:
        """Save the task every so many steps, and when the run is asked to stop."""
        if self._asked() or (self.every and step % self.every == 0):
            self.save(snapshot())
            self._stop_if_asked(f"saved after step {step} of task {self.number}")

    def save(self, progress: Progress) -> None:
        """Save a task within its training."""

    def on_task_trained(self, state: TaskState) -> None:
        """Stop if asked to."""
        self._asked()
        self._stop_if_asked(f"saved after task {state.result.number} was trained")

    def on_batch_evaluated(self, task: str, texts: Mapping[int, str], seconds: float) -> None:
        """Stop if asked to."""
        self._asked()
        self._stop_if_asked(f"saved while task {self.number} was being tested")

    def _asked(self) -> bool:
        self.stop.why = self.processes.agreed(self.stop.why)
        return self.stop.why is not None

    def _stop_if_asked(self, saved: str) -> None:
        if self.stop.why:
            raise Interrupted(f"{self.stop.why}: {saved}; the same command continues from there")


class Autosave(Stopping):
    """Write a run's log, save its state while it works, and stop it when asked to."""

    def __init__(self, directory: RunDirectory, *, every: int, stop: Stop, base: str, processes: Processes = ALONE) -> None:
        super().__init__(every=every, stop=stop, processes=processes)
        self.directory, self.base = directory, base
        self.texts, self.saved = dict[str, dict[int, str]](), time.monotonic()

    def on_warning(self, message: str) -> None:
        """Log that a saved file was damaged."""
        self.directory.log.write({"event": "damaged", "said": message, "at": now()})

    def on_task_begin(self, number: int, task: str, steps: int, done: int) -> None:
        """Log that a task begins, unless it goes on."""
        super().on_task_begin(number, task, steps, done)
        if not done:
            self.directory.log.write({"event": "task", "task": number, "name": task, "steps": steps, "at": now()})

    def on_step_end(self, event: dict[str, Any]) -> None:
        """Log the step."""
        self.directory.log.write({"event": "step", "task": self.number, **event})

    def save(self, progress: Progress) -> None:
        """Save a task within its training."""
        self.directory.checkpoint(progress.number).write_progress(progress)

    def on_task_trained(self, state: TaskState) -> None:
        """Save a trained task before it is tested."""
        self.saved = time.monotonic()
        self.directory.checkpoint(state.result.number).write_trained(state, base=self.base)
        super().on_task_trained(state)

    def on_evaluation_begin(self, number: int, examples: int, texts: Mapping[str, Mapping[int, str]]) -> None:
        """Take over the predictions from before the run was stopped."""
        self.number, self.texts = number, {task: dict(known) for task, known in texts.items()}

    def on_batch_evaluated(self, task: str, texts: Mapping[int, str], seconds: float) -> None:
        """Save the predictions so far every half minute, and when the run is asked to stop."""
        self.texts.setdefault(task, {}).update(texts)
        if self._asked() or time.monotonic() - self.saved > ANSWERS_EVERY:
            self.directory.checkpoint(self.number).write_answers(self.texts, seconds)
            self.saved = time.monotonic()
            self._stop_if_asked(f"saved while task {self.number} was being tested")

    def on_task_end(self, state: TaskState) -> None:
        """Log the task's accuracies."""
        result = state.result
        event = {"event": "evaluated", "task": result.number, "accuracy": result.accuracy, "invalid": result.invalid, "at": now()}
        self.directory.log.write(event)
