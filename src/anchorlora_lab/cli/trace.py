"""`anchorlora trace`: how a second task moves the first one's protected directions, step by step."""

from __future__ import annotations

import click

from anchorlora.cli.console import example, out, path_option
from anchorlora.cli.options import recipe_argument
from anchorlora.errors import InvalidValue
from anchorlora.recipes import protocol
from anchorlora_lab.cli.engines import StudyRequest, seeds, seeds_of, split_list, study_options


@click.command(epilog=example("anchorlora trace mini --methods seq-lora,sfor --out runs/trace"))
@recipe_argument
@click.option("--methods", "--method", "methods", help="Comma-separated methods.  [default: the paper's eight]")
@click.option(
    "--order",
    help="An order, of which the first two tasks are used, or two comma-separated tasks.  [default: the recipe's first]",
)
@seeds
@click.option(
    "--points",
    default=protocol.TRACE_POINTS,
    show_default=True,
    type=click.IntRange(min=2),
    help="Number of recorded points, both ends included.",
)
@click.option("--layers", is_flag=True, help="Also record every layer.")
@path_option("--out", "to", required=True, help="The folder for all traced runs.")
@study_options
def trace(methods: str | None, order: str | None, seeds: str, points: int, layers: bool, study: StudyRequest) -> None:
    """Trace the drift of a second task, for each method and seed.

    All methods of a seed start from the same first-task state and core. Repeat the command to run only what is missing. If
    runs are submitted without waiting, repeat it once the first tasks have finished.
    """
    from anchorlora.cli.parsing import method_named, order_named, refuse_unknown_tasks
    from anchorlora_lab.cli.progress import failures, refuse_unfit, run_all, say_finished
    from anchorlora_lab.grid.folder import remember
    from anchorlora_lab.grid.plan import TRACED, rows, starts

    if study.numbers:
        raise InvalidValue(
            f"a trace uses methods as they are defined; instead of setting {next(iter(study.numbers))}, define a method in a file"
        )
    to, recipe = study.to, study.recipe.changed({"trace_points": points, "trace_layers": layers})
    tasks = order_named(order, recipe)
    named = {name: method_named(name) for name in (split_list(methods) if methods else TRACED)}
    begun = starts(recipe, tasks, seeds_of(seeds), to)
    traced = rows(recipe, named, tasks, begun, to)
    refuse_unknown_tasks([run.config.order for run in traced if not run.done], recipe)
    engine = study.engine()
    both = [*begun.values(), *traced]
    refuse_unfit(both, study)
    remember([run.folder for run in both], to)
    outcomes = run_all(list(begun.values()), engine, study)
    outcomes += run_all([row for row in traced if begun[row.config.seed].done], engine, study)
    say_finished(traced, "trace", outcomes, to)
    if any(not run.done for run in begun.values()):
        out.print("traces continue from a first task; once it has finished, the same command starts them")
    failures(outcomes, study)
