"""One cell, start to record: loads what the configuration names, drives the sequence, saves each task, writes the record."""

from __future__ import annotations

from anchorlora.errors import InvalidValue

import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
import torch
from anchorlora import embedded
from anchorlora.adapters import NOTHING, Anchor
from anchorlora.constraints.checks import refuse_unsound
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.models.load import load_backbone
from anchorlora.continual.past import Past
from anchorlora.config import RunConfig, Recipe
from anchorlora.continual.sequence import TaskSequence, Watch
from anchorlora.devices import allocated_at_most
from anchorlora.diagnostics import Trace, held_out_drift, measure, rho_on
from anchorlora.errors import NotFinite, ProtectionLost, Stopped, Unwritten
from anchorlora.schemas.record import is_zero, largest_zero
from anchorlora.recipes import protocol
from anchorlora.runs.directory import RunDirectory, StageFacts
from anchorlora.storage.log import cut
from anchorlora.runs.autosave import Saving, Stop
from anchorlora.storage.lock import Lease
from anchorlora.runs.record import now, record_of
from anchorlora.devices import refuse_several_processes
from anchorlora.methods import Method
from anchorlora.schemas.record import Record
from anchorlora.tasks import Benchmark



def run_sequence(
    recipe: Recipe,
    method: Method,
    *,
    order: Sequence[str],
    seed: int,
    out: Path,
    name: str | None = None,
    settings: Mapping[str, float] = NOTHING,
    selection: str | None = None,
    watch: Watch | None = None,
    save_every: int = protocol.SAVE_EVERY,
    check_every: int = CHECK_EVERY,
    stop: Stop | None = None,
    allow_inexact: bool = False,
) -> Record:
    """Learn the tasks of `order` one after another and return the record of it, which is written last into `out`.

    A directory of the same configuration is gone on with where it stopped, bitwise on a CPU; a finished one is only read. name:
    what the configuration calls the method, if not by its own name; settings: numbers of its parts to change, by "Part.field";
    selection: SHA-256 of the manifest they come from; save_every: optimizer steps between two saves within a task, 0 for none;
    check_every: optimizer steps between two looks at what protects a task, as `protect` has them; stop: asks to save and stop
    between two steps; allow_inexact: go on under other versions, or on another device, than it began with.

    Raises ValueError for a directory of another configuration or one that another process works in, and where a launcher has
    started several processes; Interrupted when it was asked to stop, Unwritten when the system refused a write, TakenOver when it
    was suspended and another process has gone on, NotFinite and ProtectionLost where nothing correct can follow.
    """
    refuse_several_processes()
    called = name or method.name
    if not called:
        raise InvalidValue(f"this method has no name; give it one: ({method.definition}).named('mine')")
    cell = RunConfig(method=called, settings=dict(settings), selection=selection, order=tuple(order), seed=seed, recipe=recipe)
    method = method.named(method.name or called).changed(settings)
    watch, stop, started = watch or Watch(), stop or Stop(), now()
    with Lease(RunDirectory(out).lease) as lease:
        stop.leaving = lease.leave
        directory = RunDirectory(out, lease.check)
        directory.refuse_others(cell)
        if directory.begun and not directory.record.exists():
            _take(lease, out)
        if directory.record.exists():
            return directory.finished()
        if directory.begun:
            directory.origin.compare(recipe, allow_inexact=allow_inexact)
        sequence = sequence_of(cell, method, watch, commit=directory.origin.commit)
        if not lease.held:
            _take(lease, out)
        with _saying_what_is_kept(directory):
            directory.claim(cell)
            if directory.record.exists():  # another process has finished it meanwhile
                return directory.finished()
            directory.origin.keep(sequence.base_model, sequence.benchmark)
            sequence.check_every = check_every
            saving = Saving(directory, every=save_every, stop=stop, base=recipe.base_model.model or "")
            return _run(sequence, cell, directory, saving, started)


def _take(lease: Lease, out: Path) -> None:
    """The directory is this process's alone from here on.  Raises InUse."""
    with _saying_what_is_kept(RunDirectory(out)):
        out.mkdir(parents=True, exist_ok=True)
        lease.take()


def _run(sequence: TaskSequence, cell: RunConfig, directory: RunDirectory, saving: Saving, started: str) -> Record:
    """Everything is loaded and the directory is ours: take up what is saved, learn what is left, write the record."""
    sequence.watch = logging = _Logging(directory, sequence.watch)
    done = directory.finished_tasks(sequence.order, logging.damaged)
    sequence.keeper = saving
    try:
        _take_up(sequence, directory, done, logging, saving)
    except KeyError as error:
        raise InvalidValue(f"{directory.root / 'state'} cannot be taken up: {error.args[0]!r} is missing in it") from None
    sequence.looking = partial(_traces, sequence.recipe, directory)
    sequence.measure = partial(_drift_as_promised, sequence.method)
    saving.stop.learning = True
    _go_through(sequence, directory, done)
    return directory.write_record(record_of(cell, sequence.method, sequence, directory, done, started))


def _go_through(sequence: TaskSequence, directory: RunDirectory, done: list[StageFacts]) -> None:
    """Learn the tasks that are left, and save each."""
    base = sequence.recipe.base_model.model or ""
    with closing(sequence.stages()) as stages:
        try:
            for stage in stages:
                done.append(directory.write_stage(stage, base=base, peak_memory_bytes=peak_memory(sequence.base_model.device)))
        except Stopped as error:
            task = sequence.order[len(done)]
            found = "; ".join([str(error), *getattr(error, "__notes__", ())])
            raise type(error)(f"{task} (task {len(done) + 1}): {found}; {directory.standing()}") from None


@contextmanager
def _saying_what_is_kept(directory: RunDirectory) -> Iterator[None]:
    """A refused write ends the run, and what was saved before stays."""
    try:
        yield
    except OSError as error:
        directory.check()  # what a process that has lost its directory writes to may be gone
        reason = (error.strerror or str(error)).lower()
        where = f": {error.filename}" if error.filename else ""
        raise Unwritten(f"{reason}{where}; {directory.standing()}; the same command goes on from there") from None


def _take_up(sequence: TaskSequence, directory: RunDirectory, done: list[StageFacts], logging: _Logging, saving: Saving) -> None:
    """Bring the sequence to where the directory's run stopped: after a task, within one, or while one was being answered."""
    for finished in done:
        directory.checkpoint(finished.number).clear()  # still there if the run ended just after the task's state had its name
    number, step = len(done) + 1, 0
    traced = done[-1].trace.size if done else 0
    past = None
    if done:
        past, factors, stack = directory.restore(done, sequence.past)
    if number <= len(sequence.order):
        learned = directory.checkpoint(number).read_learned(logging.damaged)
        if learned is not None:
            past, factors, stack = directory.restore_learned(past or sequence.past, number)
            sequence.learned, number = learned, number + 1
            saving.resumed(number - 1, learned)
            traced = directory.checkpoint(number - 1).trace_size(0)
        else:
            sequence.begun = directory.checkpoint(number).read_progress(number, logging.damaged)
            step = sequence.begun.step if sequence.begun else 0
            traced = directory.checkpoint(number).trace_size(step) if step else traced
    cut(directory.trace, traced)
    directory.log.trim(number - 1, step)
    if past is not None:
        sequence.resume(past, factors, stack)
    if past is not None or step:
        directory.log.write({"event": "resumed", "task": number, "step": step, "at": now()})


def _traces(recipe: Recipe, directory: RunDirectory, task: int, steps: int) -> list[Trace]:
    points = recipe.trace.trace_points
    if points is None or task == 1:
        return []
    return [
        Trace(directory.trace, steps=steps, points=points, task=task, per_layer=recipe.trace.trace_layers, check=directory.check)
    ]


def _drift_as_promised(method: Method, anchor: Anchor, past: Past) -> dict[str, Any]:
    """The drift of a task that has just been learned, before it is saved: not as if a promise had held that did not."""
    refuse_unsound(anchor, when="at the task's end")
    drift = boundary_drift(anchor, past)
    numbers = {**drift, **(drift["held_out"] or {})}
    wrong = next((name for name, value in numbers.items() if isinstance(value, float) and not math.isfinite(value)), None)
    if wrong:
        raise NotFinite(f"{wrong} is {numbers[wrong]} at the task's end; earlier cores or held-out rows hold what is no number")
    if not method.preserves.response or is_zero(drift["rho"], drift["rho_floor"]):
        return drift
    raise ProtectionLost(
        f"{method.name} preserves the response on the core, but rho is {drift['rho']:.1e} and float32 storage explains "
        f"{largest_zero(drift['rho_floor']):.1e}; something wrote to the factors outside the optimizer's step"
    )


def peak_memory(device: torch.device) -> int:
    """The largest memory this process has taken, in bytes: of the GPU where one is used and counts it, else resident."""
    if allocated := allocated_at_most(device):
        return allocated
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def boundary_drift(anchor: Anchor, past: Past) -> dict[str, Any]:
    """A task's drift as the record has it: on its own cores, on the first and on all past cores, and on held-out rows."""
    facts: dict[str, Any] = {"task": past.tasks + 1, **measure(anchor).as_dict()}
    facts["rho_first"] = rho_on(anchor, past.first_cores)
    facts["rho_union"] = rho_on(anchor, past.union_cores)
    held_out = past.held_out
    facts["held_out"] = held_out_drift(anchor, held_out) if held_out else None
    return facts


class _Logging(Watch):
    """Writes log.jsonl, and tells whoever else watches."""

    def __init__(self, directory: RunDirectory, inner: Watch) -> None:
        self.directory, self.inner, self.number = directory, inner, 0

    def damaged(self, sentence):
        self.directory.log.write({"event": "damaged", "said": sentence, "at": now()})
        self.inner.damaged(sentence)

    def task_begins(self, number, task, steps, done):
        self.number = number
        if not done:
            self.directory.log.write({"event": "task", "task": number, "name": task, "steps": steps, "at": now()})
        self.inner.task_begins(number, task, steps, done)

    def step_done(self, event):
        self.directory.log.write({"event": "step", "task": self.number, **event})
        self.inner.step_done(event)

    def evaluation_begins(self, number, examples):
        self.inner.evaluation_begins(number, examples)

    def examples_done(self, count):
        self.inner.examples_done(count)

    def task_ends(self, stage):
        event = {"event": "evaluated", "task": stage.number, "accuracy": stage.accuracy, "invalid": stage.invalid, "at": now()}
        self.directory.log.write(event)
        self.inner.task_ends(stage)


def sequence_of(cell: RunConfig, method: Method, watch: Watch | None = None, *, commit: str | None = None) -> TaskSequence:
    """The cell's sequence with its data and base model loaded, before the first task.

    commit: of a model from the hub, where its branch was resolved before
    """
    recipe = cell.recipe
    settings = recipe.base_model.model_copy(update={"revision": commit}) if commit else recipe.base_model
    if recipe.base_model.threads:
        torch.set_num_threads(recipe.base_model.threads)
    if recipe.tasks.data is None:
        raise InvalidValue("this recipe names no data; give a CL_Benchmark folder with --data")
    data = embedded.folder(recipe.tasks.data, "data") or Path(recipe.tasks.data).expanduser()
    benchmark = Benchmark(data)
    benchmark = benchmark.training_only() if recipe.tasks.tested_on == "holdout" else benchmark
    for task in cell.order:
        benchmark.task(task)
    base_model = load_backbone(settings, folder=embedded.folder(recipe.base_model.model or "", "base_model"))
    return TaskSequence(base_model, benchmark, recipe, method, cell.order, cell.seed, boundary_drift, watch or Watch())
