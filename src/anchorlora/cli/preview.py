"""What `run --dry-run` prints: the resolved configuration and the work it means.  Loads no weights."""

from __future__ import annotations

from anchorlora import embedded
from anchorlora.continual.recipe import Cell
from anchorlora.experiments.files import dump_yaml
from anchorlora.methods import Method
from anchorlora.naming import expanded
from anchorlora.tasks import Benchmark


def preview(cell: Cell, method: Method) -> str:
    """The configuration as YAML; then, as comments, examples and optimizer steps of each task, parameters and memory."""
    notes = [*_work(cell), *_sizes(cell, method)]
    return dump_yaml(cell.model_dump(mode="json")).rstrip() + "\n" + "".join(f"# {note}\n" for note in notes)


def _work(cell: Cell) -> list[str]:
    recipe = cell.recipe
    if recipe.tasks.data is None:
        return ["no data folder yet: give one with --data"]
    benchmark = Benchmark(embedded.folder(recipe.tasks.data, "data") or expanded(recipe.tasks.data))
    lines, total = [], 0
    for name in cell.order:
        train = len(benchmark.examples(name, "train", limit=recipe.tasks.train_limit))
        test = len(benchmark.examples(name, "test", limit=recipe.tasks.test_limit))
        total += recipe.steps(train)
        lines.append(f"{name}: {train} training examples, {recipe.steps(train)} optimizer steps, {test} test examples")
    return [*lines, f"{total} optimizer steps in all"]


def _sizes(cell: Cell, method: Method) -> list[str]:
    from anchorlora.experiments.sizes import described, sizes

    name = cell.recipe.backbone.model
    if name is None:
        return ["no model yet: give one with --model"]
    try:
        folder = embedded.folder(name, "backbone")
        found = sizes(cell.recipe, tasks=len(cell.order), cumulative=method.blocks.family == "cumulative", folder=folder)
    except ValueError as error:
        return [f"sizes unknown: {error}"]
    return described(found)
