"""`anchorlora select`: choose one number of a method among predeclared candidates, on a holdout of the training data."""

from __future__ import annotations

import math

import click

from anchorlora.cli.console import example, out, path_option
from anchorlora.cli.options import methods_beginning, recipe_argument
from anchorlora.errors import Failed, InvalidValue
from anchorlora_lab.cli.engines import StudyRequest, study_options


@click.command(epilog=example("anchorlora select mini --method o-lora --out runs/selected"))
@recipe_argument
@click.option("--method", required=True, shell_complete=methods_beginning, help="A tunable method; an unknown name lists them.")
@click.option("--order", help="The task order on which candidates are compared.  [default: the recipe's first]")
@click.option("--seed", default=42, show_default=True, type=int)
@click.option("--values", metavar="X,Y,...", help="Candidates to try instead of the method's own; they are not scaled.")
@path_option("--out", "to", required=True, help="The folder for candidate runs and selection.json.")
@study_options
def select(method: str, order: str | None, seed: int, values: str | None, study: StudyRequest) -> None:
    """Choose a method's strength on a holdout of the training data.

    Writes selection.json. No test file is opened. A tenth of the training data is held out, the same for every seed and order.
    `run` and `grid` take the file with --selection and then refuse any other value. If candidates are submitted without waiting,
    repeat the command when they have finished.
    """
    from anchorlora.cli.parsing import method_named, order_named
    from anchorlora.store.files import write_text
    from anchorlora.store.selection import FILE, read_selection
    from anchorlora_lab.cli.progress import handed_over, run_all
    from anchorlora_lab.grid.selection import TUNABLE, candidate_runs, choose, scale_of

    recipe, to = study.recipe, study.to
    if study.numbers:
        raise InvalidValue(f"{next(iter(study.numbers))} is what the candidates are for; leave it out")
    if method not in TUNABLE:
        method_named(method)
        raise InvalidValue(f"{method} has nothing to choose; tunable methods: {', '.join(TUNABLE)}")
    tunable, tasks = TUNABLE[method], order_named(order, recipe)
    declared, engine = tunable.candidates if values is None else _candidates(values), study.engine()
    scale = scale_of(recipe, tunable, tasks, seed, to) if values is None else None
    scaled = [float(f"{value * (scale['factor'] if scale else 1):.6g}") for value in declared]
    candidates = candidate_runs(recipe, method, tunable, scaled, tasks, seed, to)
    for candidate_run in candidates:
        candidate_run.refuse_another()
    already = (to / FILE).exists()
    if not already:
        outcomes = run_all(candidates, engine, study)
        if any(o.status == "submitted" or o.note for o in outcomes):
            handed_over(outcomes, to)
            out.print("the same command chooses among the candidates once they have finished")
            return
        if any(o.status == "elsewhere" for o in outcomes):
            raise Failed(f"another process is running candidates in {to}; run the same command again when it has finished")
        errors = {o.planned.folder: o.error for o in outcomes if o.status == "failed"}
        write_text(to / FILE, choose(candidates, tunable, declared, scale, errors).as_json())
    manifest = read_selection(to)
    asked = [run.config.settings[tunable.parameter] for run in candidates]
    if (manifest.method, [c.value for c in manifest.candidates], manifest.order) != (method, asked, list(tasks)):
        raise InvalidValue(
            f"{to} holds the selection of another request; choose another --out, "
            f"or delete {to / FILE} to choose anew: candidates that have finished are not run again"
        )
    for candidate in manifest.candidates:
        mark = "  selected" if candidate.value == manifest.selected else ""
        reached = f"failed: {candidate.error}" if candidate.AA is None else f"AA on the holdout {candidate.AA:.2f}"
        out.print(f"{manifest.parameter} {candidate.value:g}  {reached}{mark}")
    if manifest.end:
        beyond = {"smallest": "smaller", "largest": "larger"}[manifest.end]
        out.print(f"\n{manifest.selected:g} is the {manifest.end} candidate; a {beyond} value may do better (--values)")
    out.print(f"\n{'chosen before, nothing was trained; ' if already else ''}selection: {to / FILE}")


def _candidates(values: str) -> tuple[float, ...]:
    """The candidates that --values lists, the smallest first."""
    try:
        numbers = sorted({float(value) for value in values.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < value < math.inf for value in numbers):
        raise InvalidValue(f"--values {values}: give numbers greater than 0, such as 0.1,1,10")
    return tuple(numbers)
