"""Options that the commands which run something share, and the recipe that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from anchorlora.continual.recipe import Recipe
from anchorlora.experiments import protocol

model = click.option("--model", help="A model folder or hub name.")
data = click.option("--data", help="A CL_Benchmark folder.")
settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change a field of the recipe, or a number of the method (RoutingOverlap.strength=0.05); may be repeated.",
)
seeds = click.option("--seeds", default=",".join(map(str, protocol.SEEDS)), show_default=True, help="A comma list of seeds.")
slots = click.option("--slots", type=click.IntRange(min=1), help="Runs at a time.  [default: one a GPU, or one a CPU core]")


def recipe_options(command: Callable) -> Callable:
    """--model, --data and --set."""
    return model(data(settings(command)))


def changed(recipe: Recipe, fields: dict[str, str], model: str | None, data: str | None) -> Recipe:
    """The recipe with what --set, --model and --data say."""
    named: dict[str, Any] = {name: value for name, value in (("model", model), ("data", data)) if value is not None}
    return recipe.changed(fields | named) if fields or named else recipe


def resolved(recipe: str, settings: Sequence[str], model: str | None, data: str | None) -> tuple[Recipe, dict[str, float]]:
    """The recipe that a command asks for, and numbers of methods' parts; a config.yaml counts as its recipe."""
    from anchorlora.cli.choices import recipe_named, settings_of

    fields, numbers = settings_of(settings)
    return changed(recipe_named(recipe)[0], fields, model, data), numbers
