"""Tables of what was run, what it cost, and what cores hold: task orders, settings beside the paper's, and definitions of methods;
time, memory, and parameters; the energy that cores retain, by layer and by method.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from anchorlora.pages.record import PAPER, order_label, paper_order, paper_tasks, short_layers
from anchorlora.pages.table import Column, Table, Value
from anchorlora.store.record import LayerFacts
from anchorlora_lab.report.comparability import NOTED, OWNED, leaves, within
from anchorlora_lab.report.grid import METHOD, Grid, Measure, N, by_methods, means, pivot
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.published import PARAMETERS, PUBLISHED, has_base_model, has_official_files
from anchorlora_lab.report.records import Run, by_method, mean, mean_of


def orders_table(runs: Sequence[Run]) -> Table:
    """The tasks of each order, in training order."""
    orders = Grid(runs).orders
    columns = (Column("order"), *(Column(f"task {i + 1}") for i in range(max(map(len, orders)))))
    rows = tuple((order_label(order) if paper_order(order) else f"custom {i}", *order) for i, order in enumerate(orders, 1))
    moved = [order for order in orders if paper_order(order) and paper_tasks(order) != order]
    paper = "; ".join(f"{paper_order(order)}: {', '.join(PAPER[paper_order(order) or ''])}" for order in moved)
    note = f"Named by position after the paper's orders ({paper})." if moved else ""
    return Table("orders", "Task orders", columns, rows, note)


def settings_table(runs: Sequence[Run]) -> Table:
    """Every setting that the runs share; beside the paper's value if the model and data are the paper's."""
    free = (*OWNED, *(field for field in NOTED if field.startswith("protocol.")))
    protocol = leaves(runs[0].record, fields=("protocol",))
    shared = {path: value for path, value in protocol.items() if not within(path, free)}
    names = {path.removeprefix("protocol."): value for path, value in sorted(shared.items())}
    fits = has_official_files(runs[0]) and any(has_base_model(runs[0], model) for model in PARAMETERS)
    rows = tuple((name, _as_text(value), printed_setting(name, runs[0].order) if fits else None) for name, value in names.items())
    table = Table("settings", "Settings", (Column("setting"), Column("ours"), Column("paper", printed=True)), rows)
    return table.noting_printed("paper: the published value.") if fits else table.without("paper")


def methods_table(runs: Sequence[Run]) -> Table:
    """The definition of each method, and the strength selected for it, if any."""
    measures: list[Measure] = [
        METHOD,
        (Column("runs"), len),
        (Column("definition"), lambda group: group[0].record.method.definition),
        (Column("tuned"), lambda group: _as_text(tuned) if (tuned := group[0].setting("tuned")) else None),
    ]
    table = pivot("methods", "Methods", by_method(runs).values(), measures, "")
    return table if any(row[-1] is not None for row in table.rows) else table.without("tuned")


def printed_setting(name: str, tasks: Sequence[str]) -> str | None:
    """Return the paper's value of a setting as text, or None; examples of a task are matched by the task's place."""
    protocol = PUBLISHED["protocol"]
    value: Any = protocol["settings"].get(name)
    if name.startswith("examples.") and name.endswith(".train"):
        task = name.removeprefix("examples.").removesuffix(".train")
        known = paper_tasks([task]) if task in tasks else None
        value = protocol["train_examples"][known[0]] if known else None
    elif name.startswith("examples.") and name.endswith(".test"):
        value = protocol["test_examples_per_task"] if paper_tasks(tasks) else None
    return None if value is None else _as_text(value)


def _as_text(value: Any) -> str:
    """A setting as text: whole numbers without a point, lists with commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_as_text, value))
    if isinstance(value, float):
        return format(value, "g")
    return value if isinstance(value, str) else json.dumps(value)


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
    table = by_methods("cost", "Cost of a run", Grid(runs), MEASURES)
    return table if known else table.without("ms/step")
