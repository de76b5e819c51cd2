"""Progress of a run on a terminal: a bar with the remaining time, and one line per finished task; elsewhere only the lines.

A skill has no lines of its own: the verdict has its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from anchorlora.continual.callback import RunCallback, TaskState


class ProgressCallback(RunCallback):
    """Progress of one run. Use in `with`; the bars vanish at its end, the lines stay.

    The cursor is hidden only while a task trains, since a signal before that ends the process at once.
    """

    def __init__(self, console: Console, *, tasks: int | None) -> None:
        self.console, self.tasks = console, tasks  # None: one skill
        self.progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=2)),
            BarColumn(bar_width=None, table_column=Column(min_width=8, ratio=1)),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self.bar: Any = None
        self.what = ""

    def __enter__(self) -> ProgressCallback:
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def on_warning(self, message: str) -> None:
        self.console.print(f"warning: {message}", style="yellow")

    def on_progress(self, what: str, done: int, total: int) -> None:
        if self.bar is None or self.what != what:
            self._show(what, total)
            self.console.show_cursor(True)  # until the task begins, a signal ends the process at once
        self.progress.update(self.bar, completed=done)
        if done >= total:
            self.progress.remove_task(self.bar)
            self.progress.stop()
            self.bar = None

    def on_task_begin(self, number: int, task: str, steps: int, done: int) -> None:
        self._show(f"training {task}" if self.tasks is None else f"task {number}/{self.tasks} {task}: training", steps)
        self.progress.update(self.bar, completed=done)

    def on_step_end(self, event: dict[str, Any]) -> None:
        self.progress.update(self.bar, advance=1, note=f"loss {event['loss']:.3f}")

    def on_evaluation_begin(self, number: int, examples: int, texts: Mapping[str, Mapping[int, str]]) -> None:
        self._show("testing" if self.tasks is None else f"task {number}/{self.tasks}: evaluating", examples)
        self.progress.update(self.bar, completed=sum(len(known) for known in texts.values()))

    def on_batch_evaluated(self, task: str, texts: Mapping[int, str], seconds: float) -> None:
        self.progress.update(self.bar, advance=len(texts))

    def on_task_end(self, state: TaskState) -> None:
        if self.tasks is None:
            return
        result = state.result
        accuracies = "  ".join(f"{name} {value:.1f}" for name, value in zip(state.predictions, result.accuracy, strict=True))
        rho = "" if result.drift is None or result.drift["rho"] is None else f"  rho {result.drift['rho']:.1e}"
        seconds = f"{result.train_seconds:.0f} s + {result.evaluate_seconds:.0f} s"
        line = f"task {result.number}/{self.tasks} {result.task}: {accuracies}{rho}  ({seconds})"
        self.console.print(line)

    def _show(self, description: str, total: int) -> None:
        if self.bar is not None:
            self.progress.remove_task(self.bar)
        elif self.console.is_terminal:
            self.progress.start()
        self.what = description
        self.bar = self.progress.add_task(description, total=total, note="")
