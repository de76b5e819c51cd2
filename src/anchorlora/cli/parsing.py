"""Parsing of command-line words: methods, recipes, orders, settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from anchorlora.cli.user_file import run_file
from anchorlora.config import Recipe, RunConfig, names_of_modules
from anchorlora.errors import InvalidType, InvalidValue, UnknownName, nearest_names
from anchorlora.methods import METHODS, AdapterPlan, Method
from anchorlora.paths import name_of_task
from anchorlora.recipes.protocol import ORDERS

COMMIT = "trust_remote_code"


def method_named(name: str) -> Method:
    """Return a method of the catalog, or one that a Python file defines."""
    path, colon, variable = (name, ":", "") if name.endswith(".py") else name.rpartition(":")
    if not colon:
        return METHODS[name]
    if not Path(path).is_file():
        raise UnknownName(f"there is no file {path} for the method {name!r}; give file.py:variable")
    known = vars(run_file(Path(path)))
    if variable not in known:
        there = [n for n, value in known.items() if isinstance(value, Method | AdapterPlan) and not isinstance(value, type)]
        whole = f"{path} is a file, and a method is one of its variables, {path}:NAME"
        wrong = f"{path} defines no {variable!r}" if variable else whole
        raise UnknownName(f"{wrong}; methods in it: {', '.join(there) or 'none'}")
    try:
        method = Method.of(known[variable])
    except TypeError as error:
        raise InvalidType(f"{name}: {error}") from None
    method = method.named(method.name or variable)
    if METHODS.get(method.name, method) != method:
        raise InvalidValue(f"{name}: {method.name!r} is already the name of a different method; choose another")
    return method


def recipe_named(name: str) -> tuple[Recipe, RunConfig | None]:
    """Return a recipe of the package or of a YAML file: a complete config.yaml, a recipe, or `extends: NAME` and what differs."""
    from anchorlora.recipes import RECIPES

    if name in RECIPES:
        return RECIPES[name](), None
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise UnknownName(f"no recipe called {name!r}; {nearest_names(name, RECIPES)}; the name of a recipe file ends in .yaml")
    from anchorlora.store.files import load_yaml

    content = load_yaml(path)
    if not isinstance(content, dict):
        raise InvalidValue(
            f"{path} holds no recipe; copy a run's config.yaml, or write `extends: standard-cl` and the fields that differ"
        )
    if "recipe" in content:
        config = RunConfig.read(content, str(path))
        return config.recipe, config
    if "extends" in content:
        if (base := str(content.pop("extends"))) not in RECIPES:
            raise UnknownName(f"{path} extends {base!r}, which is no recipe of the package; {nearest_names(base, RECIPES)}")
        return RECIPES[base]().changed({"name": path.stem, **_flat(content)}, where=str(path)), None
    return Recipe.read(content, str(path)), None


def recipe_of_options(
    name: str, settings: Sequence[str], model: str | None, data: str | None
) -> tuple[Recipe, RunConfig | None, dict[str, float]]:
    """Return the recipe with the changes of --set, --model, and --data, the configuration in its file, and the method's numbers."""
    recipe, stored = recipe_named(name)
    fields, numbers = settings_of(settings)
    commit = fields.get(COMMIT, fields.get(f"base_model.{COMMIT}"))
    if commit is not None or recipe.base_model.trust_remote_code is not None:  # a file alone does not run a model's code
        from anchorlora.models.trust import asked_for

        asked_for(recipe.base_model, commit, where=name, option=f"--set {COMMIT}=COMMIT")
    changes = fields | {field: value for field, value in (("model", model), ("data", data)) if value is not None}
    return recipe.changed(changes) if changes else recipe, stored, numbers


def order_named(order: str | None, recipe: Recipe) -> tuple[str, ...]:
    """Return the tasks of an order; by default the recipe's first."""
    if order is None:
        return next(iter(orders_named(None, recipe).values()))
    if order in recipe.tasks.orders:
        return recipe.tasks.orders[order]
    if order in ORDERS and recipe.tasks.orders:  # the study's, which are no names of tasks
        raise UnknownName(f"the recipe {recipe.name} has no order {order!r}; it has {', '.join(recipe.tasks.orders)}")
    near = get_close_matches(order, recipe.tasks.orders, n=3, cutoff=0.6)
    if "," not in order and near:
        raise UnknownName(f"the recipe {recipe.name} has no order {order!r}; nearest: {', '.join(near)}, or a comma list of tasks")
    names = tuple(name_of_task(task.strip()) for task in order.split(",") if task.strip())
    if not names:
        raise InvalidValue(f"--order {order!r} names no task; give an order of the recipe, or names separated by commas")
    return names


def orders_named(names: Sequence[str] | None, recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """Return orders by their names; by default all of the recipe, the first one first."""
    from anchorlora.data import TextFiles
    from anchorlora.data.sources import source_of

    if names is None or "all" in names:
        source = None if recipe.tasks.data is None else source_of(recipe.tasks)
        whole = {"all": tuple(source.names)} if isinstance(source, TextFiles) else {}
        every = whole or dict(recipe.tasks.orders)
        if not every:
            raise InvalidValue(f"the recipe {recipe.name} has no orders; name tasks, separated by commas")
        return every | {name: order_named(name, recipe) for name in names or () if name != "all"}
    return {name: order_named(name, recipe) for name in names}


def refuse_unknown_tasks(orders: Sequence[Sequence[str]], recipe: Recipe) -> None:
    """Refuse tasks that the recipe's data does not have, where runs are left; files of one's own are not read."""
    from anchorlora.data import TextFiles
    from anchorlora.data.sources import source_of

    if not orders:
        return
    source = source_of(recipe.tasks)
    for task in dict.fromkeys(task for order in orders for task in order):
        if not isinstance(source, TextFiles) or task not in source.names:
            source.task(task)


def targets_named(text: str) -> tuple[str, ...] | str:
    """Return the modules that --targets names."""
    try:
        return names_of_modules(text)
    except ValueError as error:
        raise InvalidValue(f"--targets: {error}") from None


def settings_of(pairs: Sequence[str]) -> tuple[dict[str, str], dict[str, float]]:
    """Split --set pairs into fields of the recipe and numbers of the method's parts."""
    fields: dict[str, str] = {}
    numbers: dict[str, float] = {}
    for pair in pairs:
        name, equals, value = (word.strip() for word in pair.partition("="))
        if not equals or not name:
            raise InvalidValue(f"--set takes field=value, not {pair!r}")
        if name[0].isupper() and "." in name:
            numbers[name] = _number(name, value)
        else:
            fields[name] = value
    return fields, numbers


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InvalidValue(f"--set {name} takes a number, not {value!r}") from None
    if not math.isfinite(number):
        raise InvalidValue(f"--set {name} takes a finite number, not {value}")
    return number


def _flat(content: dict, path: str = "") -> dict[str, object]:
    """{"training": {"window": 4}} -> {"training.window": 4}."""
    out: dict[str, object] = {}
    for name, value in content.items():
        if isinstance(value, dict) and name != "orders":
            out |= _flat(value, f"{path}{name}.")
        else:
            out[f"{path}{name}"] = tuple(value) if isinstance(value, list) else value
    return out
