"""The grid of a study: methods x orders x seeds x backbones, a folder each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anchorlora.continual.recipe import Cell, Recipe
from anchorlora.experiments.cells import Planned
from anchorlora.experiments.selection import Selection
from anchorlora.naming import is_reserved


@dataclass(frozen=True)
class Axes:
    """What a grid runs over.  orders: by the name that their folder gets; models: of the recipe, or several."""

    methods: Sequence[str]
    orders: Mapping[str, tuple[str, ...]]
    seeds: Sequence[int]
    models: Sequence[str] = ()


def plan(
    recipe: Recipe, axes: Axes, out: Path, *, settings: Mapping[str, Mapping[str, float]], selections: Sequence[Selection] = ()
) -> list[Planned]:
    """Every cell of the grid, seeds outermost, so that a grid that is stopped early has whole rows.

    settings: numbers to change, by method; selections: manifests that methods of their name follow.
    """
    return list(_cells(recipe, axes, out, settings, {selection.method: selection for selection in selections}))


def _cells(recipe, axes, out, settings, selections) -> Iterator[Planned]:
    for seed in axes.seeds:
        for order_name, order in axes.orders.items():
            for model in axes.models or [None]:
                mine = recipe.changed({"model": model}) if model else recipe
                for method in axes.methods:
                    selection = selections.get(method)
                    cell = Cell(
                        method=method,
                        settings={**settings.get(method, {}), **(selection.settings if selection else {})},
                        selection=selection.sha256 if selection else None,
                        order=order,
                        seed=seed,
                        recipe=mine,
                    )
                    place = out / slug(model) if len(axes.models) > 1 else out
                    yield Planned(place / slug(method) / f"{slug(order_name)}-{seed}", cell)


def slug(name: str) -> str:
    """A name as a folder: its last path component, letters that every file system takes."""
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rstrip("/").rsplit("/", 1)[-1])[:80].strip(".-") or "x"
    return f"x-{word}" if is_reserved(word) else word
