"""Progress of many runs on a terminal: a bar with the remaining time, and one line per finished run; elsewhere only the lines."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from anchorlora.cli.console import err, out
from anchorlora.cli.signals import stopping_at_once
from anchorlora.errors import Failed
from anchorlora.models.hub import refuse_no_model
from anchorlora.text import amount
from anchorlora_lab.cli.engines import StudyRequest
from anchorlora_lab.grid.folder import remember, submitting
from anchorlora_lab.grid.scheduler import Engine, Outcome, Planned, to_begin

A_DAY = 24 * 3600.0  # seconds; the remaining time is estimated from all runs so far, not from the last half minute


def bar_over(console: Console, clock: Callable[[], float] | None = None) -> Progress:
    """Return a bar over runs with the remaining time; it draws nothing if the console is not a terminal."""
    remaining = (TextColumn("remaining"), TimeRemainingColumn(elapsed_when_finished=False))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *remaining)
    hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden, speed_estimate_period=A_DAY, get_time=clock)


def run_all(planned: Sequence[Planned], engine: Engine, study: StudyRequest) -> list[Outcome]:
    """Run what is missing, with a bar over all runs and one line per finished run."""
    root = study.to
    refuse_unfit(planned, study)
    done = sum(run.done for run in planned)
    remember([run.folder for run in planned], root)
    bar = bar_over(err)
    with stopping_at_once(), bar if err.is_terminal else nullcontext():  # and then asks the runs to save and stop
        task = bar.add_task("runs", total=len(planned) - done)
        finished = 0

        def watch(outcome: Outcome) -> None:
            nonlocal finished
            finished += 1
            bar.advance(task)
            err.print(f"{finished}/{len(planned) - done} {outcome.planned.folder.relative_to(root)}  {_describe(outcome)}")

        return engine.run(planned, root=root, watch=watch, command=study.command)


def refuse_unfit(planned: Sequence[Planned], study: StudyRequest) -> None:
    """Refuse finished runs that are others than those asked for, and a base model that is not there, before anything is written."""
    for run in planned:
        run.refuse_another()
        if study.engine_name == "local" and not run.done and (model := run.config.recipe.base_model.model) is not None:
            refuse_no_model(model)


def commands(planned: Sequence[Planned], study: StudyRequest) -> None:
    """Print the command of every missing run, one a line, after writing its configuration."""
    root = study.to
    for run in planned:
        run.refuse_another()
    if all(run.done for run in planned):
        return
    remember([run.folder for run in planned], root)
    with stopping_at_once(), submitting(root):
        missing, others = to_begin(planned, root, given={}, retry_failed=study.retry_failed)
    for run in missing:
        click.echo(shlex.join(study.command(run.folder.absolute(), run.config)))
    for outcome in others:
        err.print(f"left out: {outcome.planned.folder.relative_to(root)}  {_describe(outcome)}")


def say_finished(planned: Sequence[Planned], kind: str, outcomes: Sequence[Outcome], root: Path) -> None:
    """Say how many runs are finished, and which were not waited for."""
    done = sum(run.done for run in planned)
    are, rest = "is" if 1 in (done, len(planned)) else "are", "" if outcomes else "; none was missing"
    out.print(f"{done} of {amount(len(planned), kind)} {are} finished in {root}{rest}")
    handed_over(outcomes, root)


def handed_over(outcomes: Sequence[Outcome], root: Path) -> None:
    """Say which runs were not waited for."""
    handed = Counter(_describe(o) for status in ("submitted", "elsewhere") for o in outcomes if o.status == status)
    for words, count in handed.items():
        out.print(f"{count} {words}")
    if handed:
        out.print(f"anchorlora status {root} tells how far they are")


def failures(outcomes: Sequence[Outcome], study: StudyRequest) -> None:
    """Raise Failed (exit status 1) if a run failed."""
    failed = [o for o in outcomes if o.status == "failed"]
    if failed:
        names = ", ".join(str(o.planned.folder.relative_to(study.to)) for o in failed[:5])
        more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
        option = "" if study.engine_name == "local" else " with --retry-failed"
        raise Failed(
            f"{len(failed)} of {amount(len(outcomes), 'run failed', 'runs failed')} ({names}{more}); "
            f"the first one: {failed[0].error}; the same command{option} begins them again"
        )


def _describe(outcome: Outcome) -> str:
    if outcome.status == "failed":
        return f"failed: {outcome.error}"
    if outcome.status == "submitted":
        return f"submitted: {outcome.note}"
    if outcome.status == "elsewhere":
        return f"submitted before: {outcome.note}" if outcome.note else "in progress in another process"
    return f"{outcome.seconds:.0f} s"
