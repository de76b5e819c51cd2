"""Options that the commands which run something share, and the recipe that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from anchorlora.config import Recipe
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.recipes import protocol

COMMIT = "trust_remote_code"
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
slots = click.option(
    "--slots",
    type=click.IntRange(min=1),
    help="Runs at a time, each on a GPU of its own if there are as many.  [default: one a GPU, or one a CPU core]",
)


def recipe_options(command: Callable) -> Callable:
    """--model, --data and --set."""
    return model(data(settings(command)))


@dataclass(frozen=True)
class Conduct:
    """How runs are carried out, which changes no result; every field is an argument of `run_sequence`."""

    save_every: int
    check_every: int
    allow_inexact: bool

    def words(self) -> list[str]:
        """The same for a process of its own."""
        words = ["--save-every", str(self.save_every), "--check-every", str(self.check_every)]
        return [*words, "--allow-inexact"] if self.allow_inexact else words


def conduct_options(command: Callable) -> Callable:
    """--save-every, --check-every and --allow-inexact, as one argument `conduct`, for a command that runs something."""

    @click.option(
        "--save-every",
        type=click.IntRange(min=0),
        default=protocol.SAVE_EVERY,
        show_default=True,
        help="Optimizer steps between two saves within a task; 0 saves there only when asked to stop.",
    )
    @click.option(
        "--check-every",
        type=click.IntRange(min=1),
        default=CHECK_EVERY,
        show_default=True,
        help="Optimizer steps between two looks at what protects a task; there is one after its second step and one at its end.",
    )
    @click.option(
        "--allow-inexact", is_flag=True, help="Go on with what was begun under other versions of the software or on another device."
    )
    @wraps(command)
    def gathered(*args: Any, save_every: int, check_every: int, allow_inexact: bool, **others: Any) -> Any:
        from anchorlora.devices import refuse_several_processes

        refuse_several_processes()
        return command(*args, conduct=Conduct(save_every, check_every, allow_inexact), **others)

    return gathered


def refuse_unasked_code(name: str, recipe: Recipe, fields: dict[str, str]) -> None:
    """Raises ValueError where the recipe of a file asks to run a model's code, and --set does not name the same commit."""
    from anchorlora.models.trust import asked_for

    commit = fields.get(COMMIT, fields.get(f"base_model.{COMMIT}"))
    asked_for(recipe.base_model, commit, where=name, option=f"--set {COMMIT}=COMMIT")


def changed(recipe: Recipe, fields: dict[str, str], model: str | None, data: str | None) -> Recipe:
    """The recipe with what --set, --model and --data say."""
    named: dict[str, Any] = {name: value for name, value in (("model", model), ("data", data)) if value is not None}
    return recipe.changed(fields | named) if fields or named else recipe


def resolved(recipe: str, settings: Sequence[str], model: str | None, data: str | None) -> tuple[Recipe, dict[str, float]]:
    """The recipe that a command asks for, and numbers of methods' parts; a config.yaml counts as its recipe."""
    from anchorlora.cli.parsing import recipe_named, settings_of

    fields, numbers = settings_of(settings)
    named = recipe_named(recipe)[0]
    refuse_unasked_code(recipe, named, fields)
    return changed(named, fields, model, data), numbers
