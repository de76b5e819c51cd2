"""What a run saves between two tasks: every so many steps, when a task is learned, while it is answered, and when asked to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from anchorlora.adapters import write_adapter
from anchorlora.continual.progress import Learned, Progress
from anchorlora.continual.sequence import Autosave, Stage
from anchorlora.errors import Interrupted
from anchorlora.runs.task_state import write_boundary, write_layers
from anchorlora.features.files import write_cores
from anchorlora.runs.directory import CORES_FILE, RunDirectory



ANSWERS_EVERY = 30.0  # seconds


class Stop:
    """Asked to stop: set by a signal, read between two steps.  `why` is what the run says then.

    learning: whether something has been learned that is not saved; a signal before that may end the process at once
    leaving: what is to be done then
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self.learning = False
        self.leaving: Callable[[], None] = lambda: None

    def ask(self, why: str) -> None:
        self.why = why


class Saving(Autosave):
    """Saves into a run directory every `every` optimizer steps (0: only when asked to stop), and stops when asked to."""

    def __init__(self, directory: RunDirectory, *, every: int, stop: Stop, base: str) -> None:
        self.directory, self.every, self.stop, self.base = directory, every, stop, base
        self.number, self.texts, self.saved = 0, dict[str, dict[int, str]](), time.monotonic()

    def resumed(self, number: int, learned: Learned) -> None:
        """Go on with a task that is being answered."""
        self.number, self.texts = number, {task: dict(texts) for task, texts in learned.texts.items()}

    def between_steps(self, now: Callable[[int], Progress], step: int) -> None:
        if self.stop.why or (self.every and step % self.every == 0):
            progress = now(step)
            self.directory.checkpoint(progress.number).write_progress(progress)
            self._stop_if_asked(f"saved after step {step} of task {progress.number}")

    def learned(self, stage: Stage) -> None:
        self.number, self.texts, self.saved = stage.number, {}, time.monotonic()
        numbers = Learned(stage.drift, stage.train_seconds, stage.trained_parameters, stage.history_bytes, 0.0, {})
        with self.directory.checkpoint(stage.number).write_learned(numbers) as folder:
            write_adapter(folder / "adapter", stage.factors, base=self.base)
            write_cores(folder / CORES_FILE, {layer: c.core for layer, c in stage.cores.items()}, stores=stage.stores)
            write_boundary(folder, stage)
            write_layers(folder, stage)
        self._stop_if_asked(f"saved after task {stage.number} was learned")

    def answered(self, task: str, texts: dict[int, str], seconds: float) -> None:
        self.texts.setdefault(task, {}).update(texts)
        if self.stop.why or time.monotonic() - self.saved > ANSWERS_EVERY:
            self.directory.checkpoint(self.number).write_answers(self.texts, seconds)
            self.saved = time.monotonic()
            self._stop_if_asked(f"saved while task {self.number} was answered")

    def _stop_if_asked(self, saved: str) -> None:
        if self.stop.why:
            raise Interrupted(f"{self.stop.why}: {saved}; the same command goes on from there")
