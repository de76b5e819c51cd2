"""Tables of the energy that cores retain, by layer and by method, and of what each method costs: time, memory, parameters."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.pages.labels import short_layers
from anchorlora.pages.table import Column, Table, Value
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.records import Run, by_method, mean, mean_of


def layers_of(runs: Sequence[Run]) -> list[str]:
    """Return the layers for which every run has a core after every task, in the first run's order.

    Args:
        runs: Runs of one study.
    """
    known = [{layer.module for layer in layers} for run in runs for layers in run.record.layers]
    return [layer.module for layer in runs[0].record.layers[-1] if all(layer.module in modules for modules in known)]


def energy(run: Run, path: str, *, task: int = -1) -> float:
    """Return the share of energy that a layer's core retains after a task."""
    return next(layer.retained_energy for layer in run.record.layers[task] if layer.module == path)


def energy_table(runs: Sequence[Run]) -> Table:
    """Retained energy of each layer after each task: means over all runs.

    Args:
        runs: Runs of one study.
    """
    layers = layers_of(runs)
    tasks = range(min(len(run.record.layers) for run in runs))
    columns = (Column("layer"), *(Column(f"after task {t + 1}", 3) for t in tasks), Column("min", 3), Column("directions", 1))
    rows: list[tuple[Value, ...]] = []
    for path, name in zip(layers, short_layers(layers), strict=True):
        each = [[energy(run, path, task=t) for run in runs] for t in tasks]
        sizes = [layer.k for run in runs for layer in run.record.layers[-1] if layer.module == path]
        rows.append((name, *map(mean, each), min(min(values) for values in each), mean(sizes)))
    note = (
        f"Share of the squared norm of the feature rows that lies in the core: means over all {len(runs)} runs of all methods; "
        "min: the smallest value of any run and task; directions: mean size of the core after the last task."
    )
    return Table("energy", "Retained energy by layer", columns, tuple(rows), note)


def energy_by_method(runs: Sequence[Run]) -> Table:
    """Retained energy after the last task, over all layers of each method's runs.

    Args:
        runs: Runs of one study.
    """
    columns = (Column("method"), Column("n"), Column("mean", 3), Column("min", 3), Column("directions", 1), Column("max"))
    rows = []
    for method, mine in by_method(runs).items():
        layers = [layer for run in mine for layer in run.record.layers[-1]]
        kept, sizes = [layer.retained_energy for layer in layers], [layer.k for layer in layers]
        rows.append((method, len(mine), mean(kept), min(kept), mean(sizes), max(sizes)))
    note = "After the last task, over the layers of n runs; directions, max: mean and largest number of directions in a core."
    return Table("energy-by-method", "Retained energy by method", columns, tuple(rows), note)


COLUMNS = (
    Column("method"),
    Column("runs"),
    Column("training s", 1),
    Column("ms/step", 1),
    Column("evaluation s", 1),
    Column("peak MB", 0),
    Column("trained"),
    Column("stored"),
    Column("history kB", 1),
)
NOTE = (
    "Means over runs. ms/step: training time per optimizer step; peak: memory of the process, or of the GPU if one is used; "
    "trained, stored: LoRA parameters trained in the last task and stored after it; history: what the method itself keeps of "
    "past tasks."
)


def step_seconds(run: Run) -> float | None:
    """Return the seconds per optimizer step over all tasks; None if the protocol does not give the number of steps."""
    steps = [run.steps(task) for task in run.order]
    known = [n for n in steps if n is not None]
    return sum(run.record.cost.train_seconds) / sum(known) if known and len(known) == len(steps) else None


def relative_times(runs: Sequence[Run], *, to: str) -> dict[str, float]:
    """Return the training time of each method over that of another one: the mean over the orders and seeds that both have."""
    seconds = {(run.method, tuple(run.order), run.seed): sum(run.record.cost.train_seconds) for run in runs}
    ratios: dict[str, list[float]] = {}
    for (name, order, seed), mine in seconds.items():
        if (to, order, seed) in seconds:
            ratios.setdefault(name, []).append(mine / seconds[to, order, seed])
    return {name: mean(found) for name, found in ratios.items()}


def cost_table(runs: Sequence[Run]) -> Table:
    """Time, memory, parameters, and history of each method: means over its runs.

    Args:
        runs: Runs of one study.
    """
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
    return (table if known else table.without("ms/step")).noting(grid.note)
