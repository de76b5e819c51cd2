"""A run in TensorBoard, Weights & Biases, MLflow or any other tracker that Accelerate knows.  No result depends on one.

    step  train/loss, train/learning_rate, train/grad_norm, penalty/<name>, over the optimizer steps of all tasks: 1, 2, ..
    task  accuracy/<task>, invalid/<task> and <metric>/<task> of every task so far, rho, d_eff, seconds, at its last step

A run that goes on goes on at its step. Steps that were made after the last save are made again: TensorBoard shows them once, since
the new event file begins with the step from which older ones do not count (`purge_step`); W&B keeps what it had first; MLflow keeps
both. The trackers' own files, and the names under which W&B and MLflow find the run again, are in DIR/trackers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from anchorlora.continual.callback import RunCallback, TaskState
from anchorlora.errors import MissingExtra, UnknownName, nearest_names
from anchorlora.runs.directory import RunDirectory
from anchorlora.store.files import write_text
from anchorlora.store.json import read_file
from anchorlora.store.log import read_events
from anchorlora.store.run_folder import TRACKERS

PROJECT = "anchorlora"  # what W&B calls a project and MLflow an experiment
KNOWN = "known.json"
Say = Callable[[str], None]


def trackers_named(names: str) -> tuple[str, ...]:
    """Return the trackers of a comma list, each of which can be used here."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

    trackers = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            near = nearest_names(name, LOGGER_TYPE_TO_CLASS, most=2, cutoff=0.6)
            raise UnknownName(f"Accelerate has no tracker {name!r}; {near}")
        if not filter_trackers([name], TRACKERS):
            raise MissingExtra(f"--track {name} needs a package that is not installed: pip install {name.replace('_', '-')}")
    return trackers


@contextmanager
def tracked(names: Sequence[str], out: Path, *, say: Say) -> Iterator[list[RunCallback]]:
    """Follow a run in trackers while a block runs, and close them at its end, however it ends."""
    if not names:
        yield []
        return
    trackers = Trackers(names, out, say=say)
    try:
        yield [trackers]
    finally:
        trackers.finish()


class Trackers(RunCallback):
    """Report every step and every task of one run to trackers, from the first event on, when the directory is the run's. A tracker
    that fails is dropped with one warning.
    """

    def __init__(self, names: Sequence[str], out: Path, *, say: Say) -> None:
        self.names, self.directory, self.say = tuple(names), RunDirectory(out), say
        self.running: dict[str, Any] | None = None  # by name; None before they have begun
        self.steps: dict[int, int] = {}  # of each task so far, by its number
        self.number, self.followed = 0, True

    def on_task_begin(self, number: int, task: str, steps: int, done: int) -> None:
        """Begin to follow the run, or go on at the task's next step."""
        self.followed = not self.directory.record_file.exists()
        if self.followed:
            self._know_earlier_tasks()
            self.number, self.steps[number] = number, steps
            self._begin(self._before(number) + done + 1)

    def on_step_end(self, event: dict[str, Any]) -> None:
        """Log the step's numbers."""
        numbers = {f"train/{name}": event[name] for name in ("loss", "learning_rate", "grad_norm")}
        penalties = {f"penalty/{name}": value for name, value in event["penalties"].items()}
        self._log(numbers | penalties, self._before(self.number) + event["step"])

    def on_task_end(self, state: TaskState) -> None:
        """Log every metric of every task so far, and how the layers moved."""
        result = state.result
        if self.running is None and self.followed:  # it was trained before, and tested now
            self._know_earlier_tasks()
            self._begin(self._before(result.number + 1) + 1)
        numbers: dict[str, float | None] = {name: (result.drift or {}).get(name) for name in ("rho", "d_eff")}
        rows = zip(state.predictions, result.accuracy, result.metrics, result.invalid, strict=True)
        for task, accuracy, metrics, invalid in rows:
            named = {"accuracy": accuracy, "invalid": invalid, **metrics}
            numbers |= {f"{name}/{task}": value for name, value in named.items()}
        self._log(numbers | {"seconds": result.train_seconds}, self._before(result.number + 1))

    def finish(self) -> None:
        """Close all trackers."""
        self._each(lambda tracker: tracker.finish())
        self.running = {}

    def _before(self, number: int) -> int:
        """Optimizer steps of the tasks before one."""
        return sum(steps for task, steps in self.steps.items() if task < number)

    def _know_earlier_tasks(self) -> None:
        """The run's log has the tasks that an earlier process trained."""
        if self.running is None and self.directory.log.path.is_file():
            for event in read_events(self.directory.log.path):
                if event.get("event") == "task":
                    with suppress(KeyError, TypeError, ValueError):
                        self.steps[int(event["task"])] = int(event["steps"])

    def _begin(self, step: int) -> None:
        if self.running is not None:
            return
        self.running = dict.fromkeys(self.names)
        for name in self.names:
            self._safely(name, partial(self._start, name, step))

    def _start(self, name: str, step: int) -> None:
        """Start a tracker at a step, or at the run that it has already followed."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        folder = self.directory.root / TRACKERS
        folder.mkdir(parents=True, exist_ok=True)
        kind, run, known = LOGGER_TYPE_TO_CLASS[name], folder.resolve().parent.name, _read(folder / KNOWN)
        here: dict[str, Any] = {"logging_dir": str(folder)} if kind.requires_logging_directory else {}
        own = {
            "tensorboard": {**here, "purge_step": step},
            "wandb": {"dir": str(folder), "name": run, "resume": "allow", "id": known.get(name)},
            "mlflow": {"run_name": run, "run_id": known.get(name)},
        }
        # TensorBoard's is a folder in DIR/trackers
        tracker = kind(name if name == "tensorboard" else PROJECT, **own.get(name, here))
        tracker.main_process_only = False  # only the first process has callbacks
        tracker.start()
        if name == "wandb":
            known[name] = str(tracker.tracker.id)
        elif name == "mlflow":
            known[name] = str(tracker.tracker.info.run_id)
        assert self.running is not None
        self.running[name] = tracker
        write_text(folder / KNOWN, json.dumps(known) + "\n")

    def _log(self, numbers: Mapping[str, float | None], step: int) -> None:
        if self.followed:
            values = {name: float(value) for name, value in numbers.items() if value is not None}
            self._each(lambda tracker: tracker.log(values, step=step))

    def _each(self, tell: Callable[[Any], None]) -> None:
        for name, tracker in list((self.running or {}).items()):
            self._safely(name, partial(tell, tracker))

    def _safely(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, the run is worth more
            assert self.running is not None
            with suppress(Exception):  # MLflow's run would stay open for the whole process
                self.running.pop(name).finish()
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.say(f"{name} follows this run no longer ({reason}); the run continues without it")


def _read(path: Path) -> dict[str, str]:
    """The names of earlier runs; none where the file is missing or is not what was written."""
    try:
        return read_file(path, dict[str, str], remedy="")
    except (OSError, ValueError):
        return {}
