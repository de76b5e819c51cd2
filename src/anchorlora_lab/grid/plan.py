"""The grid of a study: methods x orders x seeds x base models, a folder each.

The mechanism trace: two tasks, several methods, all of a seed from ONE state and core of the first task   (paper, fig. 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from anchorlora.adapters import AdaptedLayer, Anchor
from anchorlora.config import Recipe, RunConfig, differences
from anchorlora.constraints.base import Constraint, ProtectsPast
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Factors
from anchorlora.methods import METHODS, Method, PerTask, Shared
from anchorlora.paths import is_reserved
from anchorlora.runs.provenance import changed_data
from anchorlora.store.run_folder import RunFolder
from anchorlora.store.selection import Selection
from anchorlora_lab.grid.scheduler import Planned


@dataclass(frozen=True)
class GridAxes:
    """The axes of a grid.

    Attributes:
        methods: Methods by name, or as file.py:variable.
        orders: Name of the folder -> names of the tasks as they are trained.
        seeds: Seeds.
        models: Base models; the recipe's own by default.
    """

    methods: Sequence[str]
    orders: Mapping[str, tuple[str, ...]]
    seeds: Sequence[int]
    models: Sequence[str] = ()


def plan(
    recipe: Recipe, axes: GridAxes, out: Path, *, settings: Mapping[str, Mapping[str, float]], selections: Sequence[Selection] = ()
) -> list[Planned]:
    """Return every run of a grid, seeds outermost, so that a grid that is stopped early has complete rows.

    Args:
        recipe: The settings that all runs share.
        axes: What the grid runs over.
        out: The folder of all runs.
        settings: Method -> numbers of its parts to change, by "Part.field".
        selections: Manifests, each followed by the method that it was made for.

    Returns:
        The runs, each with its folder: out[/model]/method/order-seed.

    Example:
        >>> from pathlib import Path
        >>> from anchorlora.recipes import mini
        >>> from anchorlora_lab.grid.plan import GridAxes, plan
        >>> axes = GridAxes(methods=["seq-lora", "sfor"], orders={"order1": ("reviews", "news")}, seeds=[38, 42])
        >>> for planned in plan(mini(), axes, Path("grid"), settings={}):
        ...     print(planned.folder.as_posix())
        grid/seq-lora/order1-38
        grid/sfor/order1-38
        grid/seq-lora/order1-42
        grid/sfor/order1-42
    """
    chosen, runs = {selection.method: selection for selection in selections}, list[Planned]()
    models: Sequence[str | None] = axes.models or [None]
    for seed, (name, order), model, method in product(axes.seeds, axes.orders.items(), models, axes.methods):
        selection = chosen.get(method)
        config = RunConfig(
            method=method,
            settings={**settings.get(method, {}), **(selection.settings if selection else {})},
            selection=selection.sha256 if selection else None,
            order=order,
            seed=seed,
            recipe=recipe.changed({"model": model}) if model else recipe,
        )
        home = out / slug(model) if model and len(axes.models) > 1 else out
        runs.append(Planned(home / slug(method) / f"{slug(name)}-{seed}", config))
    return _apart(runs)


def refuse_other_data(planned: Sequence[Planned], recipe: Recipe) -> None:
    """Refuse to add runs to those that were trained on other bytes of a file, with which they could share no table.

    Args:
        planned: All runs of a grid.
        recipe: The settings that they share.
    """
    finished = next((run for run in planned if run.done), None)
    if finished is None or all(run.done for run in planned):
        return
    try:
        record = RunFolder(finished.folder).read_record()
    except InvalidValue:
        return  # whoever reads the record says what is wrong with it
    for path in changed_data(record, recipe):
        raise InvalidValue(
            f"{path} is not what {finished.folder} was trained on, so new runs could share no table with it; "
            "put it back, or choose another --out"
        )


def _apart(runs: list[Planned]) -> list[Planned]:
    """The runs, unless two of them have one folder: the second would count as done when the first is."""
    known: dict[Path, RunConfig] = {}
    for run in runs:
        if changed := differences(known.setdefault(run.folder, run.config), run.config):
            raise InvalidValue(f"two runs would share the folder {run.folder} ({changed[0]}); give each an --out of its own")
    return runs


def slug(name: str) -> str:
    """Return a name as the name of a folder, in characters that every file system takes.

    Args:
        name: A method, an order or a model; of a path, the last component counts.

    Example:
        >>> from anchorlora_lab.grid.plan import slug
        >>> slug("Qwen/Qwen3-8B"), slug("idea.py:mine")
        ('Qwen3-8B', 'idea.py-mine')
    """
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rstrip("/").rsplit("/", 1)[-1])[:80].strip(".-") or "x"
    return f"x-{word}" if is_reserved(word) else word


TRACED = tuple(name for name, method in METHODS.items() if method.entry.traced)  # the rows of the paper's two mechanism tables
STARTING_METHOD = METHODS.baseline("shared").name  # the first task is plain LoRA for every row


def starts(recipe: Recipe, order: Sequence[str], seeds: Sequence[int], out: Path) -> dict[int, Planned]:
    """Return the runs of the first task that all rows of a trace share, one per seed.

    Args:
        recipe: The settings.
        order: Names of the tasks; the first one is trained.
        seeds: Seeds.
        out: The folder of all runs.

    Returns:
        Seed -> run.

    Raises:
        ValueError: The order has fewer than two tasks.
    """
    shared: dict[str, Any] = {"method": STARTING_METHOD, "order": _two(order)[:1], "recipe": recipe}
    return {seed: Planned(out / f"start-{seed}", RunConfig(seed=seed, **shared)) for seed in seeds}


def rows(
    recipe: Recipe, methods: Mapping[str, Method], order: Sequence[str], begun: Mapping[int, Planned], out: Path
) -> list[Planned]:
    """Return one traced run per method and seed, each going on from the seed's first task.

    Args:
        recipe: The settings.
        methods: Methods by what the command calls them.
        order: Names of the tasks; the second one is traced.
        begun: Seed -> run of its first task.
        out: The folder of all runs.

    Raises:
        ValueError: A method's first task is not plain LoRA, or the order has fewer than two tasks.
    """
    for name, method in methods.items():
        _check(name, method)
    runs = []
    for (seed, start), name in product(begun.items(), methods):
        config = RunConfig(method=name, order=_two(order), seed=seed, recipe=recipe)
        runs.append(Planned(out / f"{slug(name)}-{seed}", config, start.folder))
    return _apart(runs)


def _two(order: Sequence[str]) -> tuple[str, ...]:
    if len(order) < 2:
        raise InvalidValue("a trace needs two tasks: the one to keep and the one that is trained")
    return tuple(order[:2])


def _check(name: str, method: Method) -> None:
    """A method whose first task is not plain LoRA cannot start from the shared one."""
    own = [type(c).__name__ for c in method.constraints if c.first_task == 1 or _keeps(c)]
    if method.plan not in (Shared(), PerTask()):
        own.append(type(method.plan).__name__)
    if own:
        raise InvalidValue(
            f"{name} cannot start from a first task that all rows share: {own[0]} acts in it or keeps something of it; "
            "trace it in a run of its own with --set trace_points=64"
        )


def _keeps(constraint: Constraint) -> bool:
    if type(constraint).end_task is ProtectsPast.end_task:
        return False
    factors = Factors(torch.ones(1, 2), torch.ones(2, 1), 1.0)
    try:  # one's own often says that it keeps nothing, as every constraint must say something
        return bool(constraint.end_task(Anchor((AdaptedLayer("layer", factors, factors),))))
    except Exception:  # it needs more of a task than factors
        return True
