"""The mechanism trace: two tasks, several methods, all of a seed from ONE state and core of the first task   (paper, fig. 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from anchorlora.constraints.base import ProtectsPast
from anchorlora.continual.recipe import Cell, Recipe
from anchorlora.experiments.cells import Planned
from anchorlora.experiments.grid import slug
from anchorlora.methods import Method, PerTask, Shared

# the paper's two mechanism tables
SHARED_ROWS = ("projected-lora", "projected-lora-wrp", "projected-lora-freeze-b", "sfor")
CUMULATIVE_ROWS = ("o-lora", "o-lora-hard", "o-lora-effective", "o-lora-bsr")
ROWS = SHARED_ROWS + CUMULATIVE_ROWS
STARTING_METHOD = "seq-lora"  # the first task is plain LoRA for every row


def starts(recipe: Recipe, order: Sequence[str], seeds: Sequence[int], out: Path) -> dict[int, Planned]:
    """The first task of each seed, learned once."""
    _two(order)
    return {
        seed: Planned(out / f"start-{seed}", Cell(method=STARTING_METHOD, order=tuple(order[:1]), seed=seed, recipe=recipe))
        for seed in seeds
    }


def rows(
    recipe: Recipe, methods: Mapping[str, Method], order: Sequence[str], begun: Mapping[int, Planned], out: Path
) -> list[Planned]:
    """One traced run a method and seed, which goes on from the seed's first task.  methods: by what the command calls them."""
    for name, method in methods.items():
        _check(name, method)
    return [
        Planned(
            out / f"{slug(name)}-{seed}",
            Cell(method=name, order=_two(order), seed=seed, recipe=recipe),
            start=start.folder,
        )
        for seed, start in begun.items()
        for name in methods
    ]


def _two(order: Sequence[str]) -> tuple[str, ...]:
    if len(order) < 2:
        raise ValueError("a trace needs two tasks: the one to keep and the one that is learned")
    return tuple(order[:2])


def _check(name: str, method: Method) -> None:
    """A method whose first task is not plain LoRA cannot start from the shared one."""
    own = [type(c).__name__ for c in method.constraints if c.from_task == 1 or type(c).remember is not ProtectsPast.remember]
    if type(method.blocks) not in (Shared, PerTask):
        own.append(type(method.blocks).__name__)
    if own:
        raise ValueError(
            f"{name} cannot start from a first task that all rows share: {own[0]} acts in it or keeps something of it; "
            "trace it in a run of its own with --set trace_points=64"
        )
