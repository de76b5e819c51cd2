"""Tables of the energy that cores retain, by layer and by method, and of what each method costs: time, memory, parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anchorlora.pages.record import short_layers
from anchorlora.pages.table import Column, Table, Value
from anchorlora.store.record import LayerFacts
from anchorlora_lab.report.grid import METHOD, Grid, Measure, N, by_methods, means, pivot
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.records import Run, by_method, mean, mean_of


def layers_of(runs: Sequence[Run]) -> list[str]:
    """Return the layers for which every run has a core after every task, in the first run's order."""
    known = [{layer.module for layer in layers} for run in runs for layers in run.record.layers]
    return [layer.module for layer in runs[0].record.layers[-1] if all(layer.module in modules for modules in known)]


def energy(run: Run, path: str, *, task: int = -1) -> float:
    """Return the share of energy that a layer's core retains after a task."""
    return next(layer.retained_energy for layer in run.record.layers[task] if layer.module == path)


def energy_table(runs: Sequence[Run]) -> Table:
    """Retained energy of each layer after each task: means over all runs."""
    layers = layers_of(runs)
    tasks = range(min(len(run.record.layers) for run in runs))
    columns = (Column("layer"), *(Column(f"after task {t + 1}", 3) for t in tasks), Column("min", 3), Column("directions", 1))
    rows: list[tuple[Value, ...]] = []
    for path, name in zip(layers, short_layers(layers), strict=True):
        by_task = [[energy(run, path, task=t) for run in runs] for t in tasks]
        sizes = [layer.k for run in runs for layer in run.record.layers[-1] if layer.module == path]
        rows.append((name, *map(mean, by_task), min(min(values) for values in by_task), mean(sizes)))
    return Table("energy", "Retained energy by layer", columns, tuple(rows), NOTES["energy"].format(runs=len(runs)))


def energy_by_method(runs: Sequence[Run]) -> Table:
    """Retained energy after the last task, over all layers of each method's runs."""

    def of_cores(of: Callable[[Sequence[LayerFacts]], Value]) -> Callable[[Sequence[Run]], Value]:
        return lambda group: of([core for run in group for core in run.record.layers[-1]])

    measures: list[Measure] = [
        METHOD,
        N,
        (Column("mean", 3), of_cores(lambda cores: mean([core.retained_energy for core in cores]))),
        (Column("min", 3), of_cores(lambda cores: min(core.retained_energy for core in cores))),
        (Column("directions", 1), of_cores(lambda cores: mean([core.k for core in cores]))),
        (Column("max"), of_cores(lambda cores: max(core.k for core in cores))),
    ]
    return pivot("energy-by-method", "Retained energy by method", by_method(runs).values(), measures)


MEASURES: tuple[Measure, ...] = (
    *means({"training s": lambda run: sum(run.record.cost.train_seconds)}, 1),
    (Column("ms/step", 1), lambda runs: None if (seconds := mean_of(map(step_seconds, runs))) is None else 1000 * seconds),
    *means({"evaluation s": lambda run: run.record.cost.evaluate_seconds}, 1),
    *means({"peak MB": lambda run: run.record.cost.peak_memory_bytes / 1e6}, 0),
    (Column("trained"), lambda runs: max(run.record.cost.trained_parameters for run in runs)),
    (Column("stored"), lambda runs: max(run.record.cost.stored_parameters for run in runs)),
    *means({"history kB": lambda run: run.record.cost.history_bytes / 1e3}, 1),
)


def step_seconds(run: Run) -> float | None:
    """Return the seconds per optimizer step over all tasks; None if the protocol does not give the number of steps."""
    known = [n for task in run.order if (n := run.steps(task)) is not None]
    return sum(run.record.cost.train_seconds) / sum(known) if known and len(known) == len(run.order) else None


def cost_table(runs: Sequence[Run]) -> Table:
    """Time, memory, parameters, and history of each method: means over its runs."""
    known = any(step_seconds(run) is not None for run in runs)
    table = by_methods("cost", "Cost of a run", Grid.of(runs), MEASURES)
    return table if known else table.without("ms/step")
