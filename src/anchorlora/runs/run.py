"""One run, start to record: load what the configuration names, drive the sequence, save each task, write the record."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anchorlora.adapters import NOTHING, Anchor
from anchorlora.config import Recipe, RunConfig
from anchorlora.constraints.checks import refuse_unsound
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.continual.callback import ResumePoint, RunCallback, Tell, notify
from anchorlora.continual.inputs import RunInputs
from anchorlora.continual.past import Past
from anchorlora.continual.sequence import TaskSequence
from anchorlora.data import TaskSource
from anchorlora.data.sources import source_of
from anchorlora.errors import InvalidValue, NotFinite, ProtectionLost, Stopped, UnknownName, Unwritten
from anchorlora.measurement import Trace, held_out_drift, measure, predicted_kl, rho_on
from anchorlora.methods import Method
from anchorlora.models.load import device_of, tokenizer_of
from anchorlora.models.session import Session
from anchorlora.models.tokenizer import TOKENIZER_CONFIG
from anchorlora.paths import expanded
from anchorlora.processes import ALONE, Processes, processes_on
from anchorlora.recipes import protocol
from anchorlora.runs.autosave import Autosave, Stop, Stopping
from anchorlora.runs.checkpoint import SavedResult
from anchorlora.runs.directory import RunDirectory
from anchorlora.runs.record import now, record_of
from anchorlora.store.lock import Lease
from anchorlora.store.log import cut
from anchorlora.store.record import Record, is_zero, largest_zero


def run_sequence(
    recipe: Recipe,
    method: Method,
    *,
    order: Sequence[str] | str,
    seed: int,
    out: Path | str,
    name: str | None = None,
    settings: Mapping[str, float] = NOTHING,
    selection: str | None = None,
    source: TaskSource | None = None,
    session: Session | None = None,
    callbacks: Sequence[RunCallback] = (),
    save_every: int = protocol.SAVE_EVERY,
    check_every: int = CHECK_EVERY,
    stop: Stop | None = None,
    allow_inexact: bool = False,
    leave_last: bool = False,
) -> Record:
    """Train a method on tasks in order, test every task after each, and return the record, which is written last into `out`.

    A directory of the same configuration goes on where it stopped, bitwise on a CPU; a finished one is only read. Started by
    torchrun or accelerate launch, the processes make one run together; callbacks are called in the first of them, which writes.

    Args:
        recipe: Base model, data and all numbers of training, features and evaluation.
        method: The method to train with.
        order: Names of the tasks as they are trained, or the name of one of the recipe's orders.
        seed: The seed that all random streams derive from.
        out: The run directory, which is made if it is missing.
        name: What the configuration calls the method; its own name by default.
        settings: Numbers of the method's parts to change, by "Part.field".
        selection: SHA-256 of the selection manifest that `settings` come from.
        source: Where tasks come from; by default, the folder that the recipe names.
        session: The recipe's base model if it is open already; by default, the run loads it.
        callbacks: Told of every moment of the run, before it is saved.
        save_every: Optimizer steps between two saves within a task; 0 saves only at the end of a task.
        check_every: Optimizer steps between two checks of what protects a task.
        stop: Asks the run to save and stop between two steps.
        allow_inexact: Go on under other versions, or on another device, than the run began with; the record says so.
        leave_last: Do not read what answers of the last task depend on, which only a later task needs.

    Returns:
        The record of the finished run.

    Raises:
        ValueError: The directory is of another configuration or in use, the method has no name, or the launcher is not supported.
        UnknownName: The recipe has no order of that name.
        Interrupted: The run was asked to stop; the same call goes on.
        Unwritten: The system refused a write.
        TakenOver: The process was suspended, and another one has gone on.
        NotFinite: A loss, gradient or feature is NaN or infinite.
        ProtectionLost: A condition that the method promises was violated.

    Example:
        >>> import anchorlora
        >>> from anchorlora.recipes import mini
        >>> recipe = mini().changed({"train_limit": 8, "test_limit": 2, "epochs": 1, "max_new_tokens": 2})
        >>> sfor, order = anchorlora.METHODS["sfor"], ["reviews", "news"]
        >>> record = anchorlora.run_sequence(recipe, sfor, order=order, seed=42, out=tmp / "run")
        >>> [len(row) for row in record.accuracy]
        [1, 2]
    """
    called = name or method.name
    if isinstance(order, str):
        if order not in recipe.tasks.orders:
            known = ", ".join(recipe.tasks.orders)
            raise UnknownName(f"the recipe {recipe.name} has no order {order!r}; give a list of tasks, or: {known}")
        order = recipe.tasks.orders[order]
    if not called:
        raise InvalidValue(f"this method has no name; give it one: ({method.definition}).named('mine')")
    config = RunConfig(method=called, settings=dict(settings), selection=selection, order=tuple(order), seed=seed, recipe=recipe)
    method = method.named(method.name or called).changed(settings)
    stop, started = stop or Stop(), now()
    processes = processes_on(device_of(recipe.base_model))
    with Lease(RunDirectory(Path(out)).lease) as lease:  # the first process takes it, which alone reads and writes the directory
        stop.leaving = lease.leave
        directory = RunDirectory(Path(out), check=lease.check)
        origin = processes.told(partial(_opened, directory, config, lease, allow_inexact=allow_inexact))
        if isinstance(origin, Record):
            return origin
        if not processes.first:
            torch.set_num_threads(origin.threads)
        tell = partial(notify, callbacks, RunCallback.on_progress) if processes.first and callbacks else None
        inputs = processes.together(
            lambda: load_inputs(config, origin=origin, source=source, session=session, processes=processes, tell=tell)
        )
        inputs.go_on(method)  # what cannot be done is refused before anything is written
        everyone: tuple[RunCallback, ...] = (Stopping(every=save_every, stop=stop, processes=processes),)
        if processes.first:
            saving = Autosave(directory, every=save_every, stop=stop, base=recipe.base_model.model or "", processes=processes)
            everyone = (*callbacks, saving, _Measuring(method, recipe, directory))

        def begun() -> Record | tuple[list[SavedResult], ResumePoint]:
            if not lease.held:
                _take(lease, directory.root)
            directory.claim(config)
            if directory.record_file.exists():  # another process has finished it meanwhile
                return directory.finished()
            directory.provenance.keep(inputs.base_model, inputs.source, recipe.start, date=origin.date)
            return _resume(inputs, method, directory, everyone)

        with _saying_what_is_kept(directory):
            beginning = processes.told(begun)
            if isinstance(beginning, Record):
                return beginning
            done, resume = beginning
            if not processes.first:
                resume.past.rows.device = inputs.base_model.device
            try:
                sequence = TaskSequence(
                    inputs, method, callbacks=everyone, resume=resume, check_every=check_every, leave_last=leave_last
                )
            except KeyError as error:
                raise _not_resumed(directory, error) from None
            stop.training = True
            _go_through(sequence, directory, done)
            return processes.told(lambda: directory.write_record(record_of(config, method, inputs, directory, done, started)))


@dataclass(frozen=True)
class Origin:
    """The conditions under which a run began, which hold when it goes on."""

    commit: str | None = None  # of a base model from the hub
    date: str | None = None  # day that chat templates see
    threads: int = 0


def _opened(directory: RunDirectory, config: RunConfig, lease: Lease, *, allow_inexact: bool) -> Record | Origin:
    """The record of a finished run, or the conditions of one that begins or goes on; nothing is written where one begins."""
    directory.refuse_others(config)
    if directory.has_begun and not directory.record_file.exists():
        _take(lease, directory.root)
    if directory.record_file.exists():
        return directory.finished()
    provenance = directory.provenance
    if directory.has_begun:
        provenance.compare(config.recipe, allow_inexact=allow_inexact)
    return Origin(provenance.commit, provenance.date or now()[:10], torch.get_num_threads())


def _take(lease: Lease, out: Path) -> None:
    """The directory is this process's alone from here on.  Raises InUse."""
    with _saying_what_is_kept(RunDirectory(out)):
        out.mkdir(parents=True, exist_ok=True)
        lease.take()


def _resume(
    inputs: RunInputs, method: Method, directory: RunDirectory, callbacks: Sequence[RunCallback]
) -> tuple[list[SavedResult], ResumePoint]:
    """The results of the finished tasks, and where the run goes on."""
    warn = partial(notify, callbacks[::-1], RunCallback.on_warning)  # the log first
    done = directory.finished_tasks(inputs.data.order, warn)
    try:
        resume, traced = directory.resume_point(inputs.past(method), inputs.data.order, done, warn)
        number, step = resume.past.tasks + 1, resume.progress.step if resume.progress else 0
        cut(directory.trace, traced)
        directory.log.trim(number - 1, step)
    except KeyError as error:
        raise _not_resumed(directory, error) from None
    if resume.past.tasks or step:
        directory.log.write({"event": "resumed", "task": number, "step": step, "at": now()})
    return done, resume


def _not_resumed(directory: RunDirectory, error: KeyError) -> InvalidValue:
    return InvalidValue(f"{directory.root / 'state'} cannot be resumed: {error.args[0]!r} is missing in it")


def _go_through(sequence: TaskSequence, directory: RunDirectory, done: list[SavedResult]) -> None:
    """Train the tasks that are left, and save each."""
    base, processes = sequence.recipe.base_model.model or "", sequence.processes
    tokenizer = _tokenizer_beside(sequence)
    with closing(sequence.run()) as states:
        try:
            for state in states:
                done.append(processes.told(partial(directory.write_task, state, base=base, tokenizer=tokenizer)))
        except Stopped as error:
            task = sequence.order[len(done)]
            notes = "; ".join([str(error), *getattr(error, "__notes__", ())])
            raise type(error)(f"{task} (task {len(done) + 1}): {notes}; {directory.standing()}") from None


def _tokenizer_beside(sequence: TaskSequence) -> Any:
    """The tokenizer that came with the old adapter, whose template the new one is used with, too; None where none came."""
    settings, old = sequence.recipe.base_model, sequence.recipe.start.old_adapter
    if old is None or not (expanded(old) / TOKENIZER_CONFIG).is_file():
        return None
    return tokenizer_of(settings.model_copy(update={"revision": sequence.base_model.revision}), adapter=expanded(old))


@contextmanager
def _saying_what_is_kept(directory: RunDirectory) -> Iterator[None]:
    """A refused write ends the run, and what was saved before stays."""
    try:
        yield
    except (NotADirectoryError, FileExistsError):
        raise  # a wrong path, which no repeated command makes right
    except OSError as error:
        directory.check()  # what a process that has lost its directory writes to may be gone
        reason = (error.strerror or str(error)).lower()
        where = f": {error.filename}" if error.filename else ""
        raise Unwritten(f"{reason}{where}; {directory.standing()}; the same command continues from there") from None


class _Measuring(RunCallback):
    """Traces a task where the recipe asks for it, and measures its drift at its end."""

    def __init__(self, method: Method, recipe: Recipe, directory: RunDirectory) -> None:
        self.method, self.settings, self.directory = method, recipe.trace, directory

    def observers(self, number: int, steps: int) -> list[Trace]:
        """Return the trace of a task from the second on, if the recipe asks for one."""
        points, per_layer, directory = self.settings.trace_points, self.settings.trace_layers, self.directory
        if points is None or number == 1:
            return []
        return [Trace(directory.trace, steps=steps, points=points, task=number, per_layer=per_layer, check=directory.check)]

    def drift(self, anchor: Anchor, past: Past) -> dict[str, Any]:
        """Return the drift of the task; raise ProtectionLost where the method's promise does not hold."""
        refuse_unsound(anchor, when="at the task's end")
        drift, method = boundary_drift(anchor, past), self.method
        numbers = {**drift, **(drift["held_out"] or {})}
        wrong = next((name for name, value in numbers.items() if isinstance(value, float) and not math.isfinite(value)), None)
        if wrong:
            raise NotFinite(
                f"{wrong} is {numbers[wrong]} at the task's end; earlier cores or held-out rows hold something that is not a number"
            )
        if not method.preserves.response or is_zero(drift["rho"], drift["rho_floor"]):
            return drift
        raise ProtectionLost(
            f"{method.name} preserves the response on the core, but rho is {drift['rho']:.1e} and float32 storage explains "
            f"{largest_zero(drift['rho_floor']):.1e}; something wrote to the factors outside the optimizer's step"
        )


def boundary_drift(anchor: Anchor, past: Past) -> dict[str, Any]:
    """Return the drift of a task as its record has it."""
    return {"task": past.tasks + 1, **measure(anchor).as_dict()} | {
        "rho_first": rho_on(anchor, past.first_cores),
        "rho_union": rho_on(anchor, past.union_cores),
        "held_out": held_out_drift(anchor, past.held_out),
        "predicted_kl": predicted_kl(anchor),
    }


def load_inputs(
    config: RunConfig,
    *,
    origin: Origin = Origin(),
    source: TaskSource | None = None,
    session: Session | None = None,
    processes: Processes = ALONE,
    tell: Tell | None = None,
) -> RunInputs:
    """Load the data and the base model of a run; a session has the model already."""
    recipe, settings = config.recipe, config.recipe.base_model
    began = {"revision": origin.commit or settings.revision, "date": settings.date or origin.date}
    settings = settings.model_copy(update=began)
    old = None if recipe.start.old_adapter is None else expanded(recipe.start.old_adapter)
    if recipe.base_model.threads:
        torch.set_num_threads(recipe.base_model.threads)
    source = source or source_of(recipe.tasks)
    for task in config.order:
        source.task(task)
    if session is None:
        session = Session(settings, adapter=old)
    session.refuse_other(recipe.base_model)
    return RunInputs.of(session.bare(), source, recipe, order=config.order, seed=config.seed, processes=processes, tell=tell)
