"""How much of the feature energy the cores hold, by layer and by method.

What each method took: time, memory, parameters, and what it must keep of the past.
"""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.reports.grid import Grid
from anchorlora.reports.labels import short_layers
from anchorlora.reports.records import Run, by_method, mean, mean_of
from anchorlora.reports.table import Column, RunConfig, Table


def layers_of(runs: Sequence[Run]) -> list[str]:
    """Layers that every run has a core of after every task, in the first run's order."""
    known = [{layer.module for layer in layers} for run in runs for layers in run.record.layers]
    return [layer.module for layer in runs[0].record.layers[-1] if all(layer.module in modules for modules in known)]


def energy(run: Run, path: str, *, task: int = -1) -> float:
    """The share of energy that a layer's core retains after a task (0-based; the last by default)."""
    return next(layer.retained_energy for layer in run.record.layers[task] if layer.module == path)


def energy_table(runs: Sequence[Run]) -> Table:
    """Retained energy of each layer after each task: means over all runs."""
    layers = layers_of(runs)
    tasks = range(min(len(run.record.layers) for run in runs))
    columns = (Column("layer"), *(Column(f"after task {t + 1}", 3) for t in tasks), Column("least", 3), Column("directions", 1))
    rows: list[tuple[RunConfig, ...]] = []
    for path, name in zip(layers, short_layers(layers), strict=True):
        each = [[energy(run, path, task=t) for run in runs] for t in tasks]
        sizes = [layer.k for run in runs for layer in run.record.layers[-1] if layer.module == path]
        rows.append((name, *map(mean, each), min(min(values) for values in each), mean(sizes)))
    note = (
        f"Share of the squared norm of feature rows inside the core: means over all {len(runs)} runs of all methods; "
        "least: the smallest of any run and task; directions: the core's size after the last task, mean."
    )
    return Table("energy", "Retained energy by layer", columns, tuple(rows), note)


def energy_by_method(runs: Sequence[Run]) -> Table:
    """The same after the last task, over all layers of a method's runs."""
    columns = (Column("method"), Column("n"), Column("mean", 3), Column("least", 3), Column("directions", 1), Column("most"))
    rows = []
    for method, mine in by_method(runs).items():
        layers = [layer for run in mine for layer in run.record.layers[-1]]
        kept, sizes = [layer.retained_energy for layer in layers], [layer.k for layer in layers]
        rows.append((method, len(mine), mean(kept), min(kept), mean(sizes), max(sizes)))
    note = "After the last task, over the layers of n runs; directions, most: mean and largest size of a core."
    return Table("energy-by-method", "Retained energy by method", columns, tuple(rows), note)


COLUMNS = (
    Column("method"),
    Column("cells"),
    Column("train s", 1),
    Column("ms a step", 1),
    Column("evaluate s", 1),
    Column("peak MB", 0),
    Column("trained"),
    Column("stored"),
    Column("history kB", 1),
)
NOTE = (
    "Means over cells. ms a step: training time by optimizer steps; peak: memory of the process, or of the GPU where one is "
    "used; trained, stored: LoRA parameters in and after the last task; history: what the method itself needs of the past."
)


def step_seconds(run: Run) -> float | None:
    """Seconds an optimizer step, over all tasks; None where the protocol does not tell the number of steps."""
    steps = [run.steps(task) for task in run.order]
    known = [n for n in steps if n is not None]
    return sum(run.record.cost.train_seconds) / sum(known) if known and len(known) == len(steps) else None


def cost_table(runs: Sequence[Run]) -> Table:
    """Means over a method's cells."""
    grid, rows = Grid.of(runs), []
    for method in grid.methods:
        mine = grid.of_method(method)
        costs, step = [run.record.cost for run in mine], mean_of(map(step_seconds, mine))
        rows.append(
            (
                method,
                grid.count(method),
                mean([sum(c.train_seconds) for c in costs]),
                None if step is None else 1000 * step,
                mean([c.evaluate_seconds for c in costs]),
                mean([c.peak_memory_bytes / 1e6 for c in costs]),
                max(c.trained_parameters for c in costs),
                max(c.stored_parameters for c in costs),
                mean([c.history_bytes / 1e3 for c in costs]),
            )
        )
    table = Table("cost", "Cost of a run", COLUMNS, tuple(rows), NOTE, grid.partial)
    known = any(row[3] is not None for row in rows)
    return (table if known else table.without("ms a step")).noting(grid.note)
