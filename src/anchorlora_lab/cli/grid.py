"""`anchorlora grid`: every missing run of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorlora.cli.console import example, out, path_option
from anchorlora.cli.dry_run import estimate_time, flops_option
from anchorlora.cli.options import recipe_argument
from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.text import amount
from anchorlora_lab.cli.engines import StudyRequest, seeds, seeds_of, split_list, study_options

if TYPE_CHECKING:
    from anchorlora.methods import Method


@click.command(epilog=example("anchorlora grid mini --methods seq-lora,sfor --out runs/grid"))
@recipe_argument
@click.option("--methods", required=True, help="Comma-separated methods, or all.")
@click.option(
    "--orders",
    help="Comma-separated orders of the recipe, or tasks for runs of one task each; all: every order, or all tasks of your own "
    "files in their order.  [default: all]",
)
@seeds
@click.option("--models", help="Comma-separated base models, to compare several.")
@path_option("--out", "to", required=True, help="The folder for all run directories.")
@path_option("--selection", "manifests", multiple=True, help="A selection.json; may be repeated.")
@study_options
@click.option("--dry-run", is_flag=True, help="List all runs, mark the missing ones, and print the expected time; write nothing.")
@click.option("--list", "to_list", is_flag=True, help="Print the command of each missing run, one a line; start nothing.")
@flops_option
def grid(
    methods: str,
    orders: str | None,
    seeds: str,
    models: str | None,
    manifests: tuple[Path, ...],
    study: StudyRequest,
    dry_run: bool,
    to_list: bool,
    flops: float | None,
) -> None:
    """Run every missing combination of methods, orders, and seeds.

    Each run is a separate process with its own run directory. Repeat the command to run only what is missing. A run that fails
    does not stop the others. Several local calls may work on one folder at the same time.
    """
    from anchorlora.cli.parsing import method_named, orders_named, refuse_unknown_tasks
    from anchorlora.methods import METHODS
    from anchorlora.store.selection import read_selection
    from anchorlora_lab.cli.progress import commands, failures, run_all, say_finished
    from anchorlora_lab.grid.plan import GridAxes, plan, refuse_other_data

    recipe, numbers = study.recipe, study.numbers
    named = orders_named(split_list(orders) if orders else None, recipe)
    chosen = {name: method_named(name) for name in (METHODS if methods == "all" else split_list(methods))}
    axes = GridAxes(list(chosen), named, seeds_of(seeds), split_list(models) if models else ())
    selections = [read_selection(path) for path in manifests]
    settings = _settings(chosen, numbers)
    _refuse_unfitting(selections, axes.methods, numbers)
    planned = plan(recipe, axes, study.to, settings=settings, selections=selections)
    if dry_run:
        for run in planned:
            run.refuse_another()
            out.print(f"{'done   ' if run.done else 'missing'}  {run.folder}")
        missing = sum(not run.done for run in planned)
        out.print(f"{missing} of {amount(len(planned), 'run')} {'is' if 1 in (missing, len(planned)) else 'are'} missing")
        for line in estimate_time([run.config for run in planned if not run.done], study.at_a_time(), flops):
            out.print(line)
        return
    refuse_unknown_tasks([run.config.order for run in planned if not run.done], recipe)
    refuse_other_data(planned, recipe)
    if to_list:
        if study.engine_name != "local":
            raise InvalidValue(
                f"--list prints commands for you to start, and --engine {study.engine_name} starts them; leave out one"
            )
        commands(planned, study)
        return
    outcomes = run_all(planned, study.engine(), study)
    say_finished(planned, "run", outcomes, study.to)
    failures(outcomes, study)


def _settings(methods: Mapping[str, Method], numbers: dict[str, float]) -> dict[str, dict[str, float]]:
    """The numbers that each method has; a number that no method has is refused."""
    settings: dict[str, dict[str, float]] = {name: {} for name in methods}
    for number, value in numbers.items():
        kind = number.partition(".")[0]
        having = [name for name, method in methods.items() if kind in {type(part).__name__ for part in method.parts}]
        if not having:
            raise UnknownName(f"no method of this grid has a part called {kind!r} ({number})")
        for name in having:
            methods[name].changed({number: value})
            settings[name][number] = value
    return settings


def _refuse_unfitting(selections, methods: Sequence[str], numbers: dict[str, float]) -> None:
    for selection in selections:
        if selection.method not in methods:
            raise InvalidValue(f"a selection was given for {selection.method}, which is not a method of this grid")
        if [other.method for other in selections].count(selection.method) > 1:
            raise InvalidValue(f"several selections were given for {selection.method}; give the one that its runs should follow")
        if numbers.get(selection.parameter, selection.selected) != selection.selected:
            raise InvalidValue(
                f"{selection.parameter} was selected on the holdout as {selection.selected:g}; leave out --set or --selection"
            )
