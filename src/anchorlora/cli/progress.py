"""What a person sees while a run works: a bar with the time left for training and for evaluation, one line a finished task.

Where the output is no terminal, only the lines.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from anchorlora.continual.sequence import Stage, Watch


class Bars(Watch):
    """Use as a context; the bars vanish when it ends, the lines stay.

    The terminal is left as it is until the first task begins: a signal before that ends the process where it is.
    """

    def __init__(self, console: Console, *, tasks: int) -> None:
        self.console, self.tasks = console, tasks
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.bar: Any = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def damaged(self, sentence: str) -> None:
        self.console.print(f"warning: {sentence}", style="yellow")

    def task_begins(self, number: int, task: str, steps: int, done: int) -> None:
        self._show(f"task {number}/{self.tasks} {task}: learning", steps)
        self.progress.update(self.bar, completed=done)

    def step_done(self, event: dict[str, Any]) -> None:
        self.progress.update(self.bar, advance=1, note=f"loss {event['loss']:.3f}")

    def evaluation_begins(self, number: int, examples: int) -> None:
        self._show(f"task {number}/{self.tasks}: answering", examples)

    def examples_done(self, count: int) -> None:
        self.progress.update(self.bar, advance=count)

    def task_ends(self, stage: Stage) -> None:
        accuracies = "  ".join(f"{name} {value:.1f}" for name, value in zip(stage.answers, stage.accuracy, strict=True))
        rho = "" if stage.drift is None or stage.drift["rho"] is None else f"  rho {stage.drift['rho']:.1e}"
        seconds = f"{stage.train_seconds:.0f} s + {stage.evaluate_seconds:.0f} s"
        line = f"task {stage.number}/{self.tasks} {stage.task}: {accuracies}{rho}  ({seconds})"
        self.console.print(line)

    def _show(self, description: str, total: int) -> None:
        if self.bar is not None:
            self.progress.remove_task(self.bar)
        elif self.console.is_terminal:
            self.progress.start()
        self.bar = self.progress.add_task(description, total=total, note="")
