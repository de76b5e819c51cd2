"""`anchorlora select`: one number of a method, chosen among predeclared candidates on a holdout of the training data."""

from __future__ import annotations

from pathlib import Path

import click

from anchorlora.cli.console import out
from anchorlora.cli.options import Conduct, conduct_options, recipe_options, resolved, slots
from anchorlora.errors import Failed, InvalidValue


@click.command()
@click.argument("recipe")
@click.option("--method", required=True, help="A tunable method; a wrong name lists them.")
@click.option("--order", default="order1", show_default=True, help="The order of tasks that candidates are compared on.")
@click.option("--seed", default=42, show_default=True, type=int)
@click.option(
    "--out", "to", required=True, type=click.Path(path_type=Path), help="The folder of candidate runs and selection.json."
)
@slots
@recipe_options
@conduct_options
def select(
    recipe: str,
    method: str,
    order: str,
    seed: int,
    to: Path,
    slots: int | None,
    model: str | None,
    data: str | None,
    settings: tuple[str, ...],
    conduct: Conduct,
) -> None:
    """Choose a method's strength before any test file is opened, and write selection.json.

    A tenth of the training data is held out, the same for every seed and order. `run` and `grid` take the manifest with
    --selection and then refuse another value.
    """
    from anchorlora.cli.parsing import method_named, order_named
    from anchorlora.cli.progress import run_all
    from anchorlora.study.selection import FILE, TUNABLE, candidate_runs, choose, read_selection, write_selection
    from anchorlora.study.slots import slots_for

    chosen, numbers = resolved(recipe, settings, model, data)
    if numbers:
        raise InvalidValue(f"{next(iter(numbers))} is what candidates are declared for; leave it out")
    if method not in TUNABLE:
        method_named(method)
        raise InvalidValue(f"{method} has nothing to choose; tunable are: {', '.join(TUNABLE)}")
    tunable, tasks = TUNABLE[method], order_named(order, chosen)
    declared, at_a_time = tunable.candidates, slots_for(chosen.base_model.device, slots)
    scale = _scale(chosen, tunable, tasks, seed, to)
    values = [float(f"{value * (scale['factor'] if scale else 1):.6g}") for value in declared]
    cells = candidate_runs(chosen, method, tunable, values, tasks, seed, to)
    if not (to / FILE).exists():
        outcomes = run_all(cells, root=to, slots=at_a_time, conduct=conduct)
        if any(o.status == "elsewhere" for o in outcomes):
            raise Failed(f"another process is running candidates in {to}; the same command selects when it has finished")
        errors = {o.planned.folder: o.error for o in outcomes if o.status == "failed"}
        write_selection(choose(cells, tunable, declared, scale, errors), to)
    manifest = read_selection(to)
    asked = [each.config.settings[tunable.parameter] for each in cells]
    if (manifest.method, [c.value for c in manifest.candidates], manifest.order) != (method, asked, list(tasks)):
        raise InvalidValue(f"{to} holds the selection of another request; choose another --out")
    for candidate in manifest.candidates:
        mark = "  selected" if candidate.value == manifest.selected else ""
        reached = f"failed: {candidate.error}" if candidate.AA is None else f"AA on the holdout {candidate.AA:.2f}"
        out.print(f"{manifest.parameter} {candidate.value:g}  {reached}{mark}")
    out.print(f"\nselection: {to / FILE}")


def _scale(recipe, tunable, tasks: tuple[str, ...], seed: int, to: Path) -> dict[str, float] | None:
    """The measured gradient scale and its factor, kept beside the candidates; None where candidates stand as declared."""
    import json

    if tunable.scaled == "as declared":
        return None
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights
    from anchorlora.schemas.json import read_file

    kept = to / "scale.json"
    if not kept.exists():
        from anchorlora.config import RunConfig
        from anchorlora.methods import METHODS
        from anchorlora.runs.run import sequence_of
        from anchorlora.storage.files import write_text
        from anchorlora.study.selection import factor, measured

        cell = RunConfig(method="seq-lora", order=tasks[:2], seed=seed, recipe=recipe.changed({"tested_on": "holdout"}))
        gradients = measured(sequence_of(cell, METHODS["seq-lora"]))
        found = gradients | {"factor": factor(tunable.scaled, gradients, learning_rate=recipe.training.learning_rate)}
        to.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps(found) + "\n")
    return read_file(kept, dict[str, float], remedy="delete it; it is measured again")
