"""What `run --dry-run` prints: the resolved configuration and the work it means.  Loads no weights."""

from __future__ import annotations

from pathlib import Path

from anchorlora import embedded
from anchorlora.continual.recipe import Cell
from anchorlora.experiments.files import dump_yaml
from anchorlora.tasks import Benchmark


def preview(cell: Cell) -> str:
    """The configuration as YAML, then examples and optimizer steps of each task."""
    recipe = cell.recipe
    lines = [dump_yaml(cell.model_dump(mode="json")).rstrip()]
    if recipe.tasks.data is None:
        return "\n".join(lines) + "\n# no data folder yet: give one with --data\n"
    benchmark = Benchmark(embedded.folder(recipe.tasks.data, "data") or Path(recipe.tasks.data).expanduser())
    total = 0
    for name in cell.order:
        train = len(benchmark.examples(name, "train", limit=recipe.tasks.train_limit))
        test = len(benchmark.examples(name, "test", limit=recipe.tasks.test_limit))
        total += recipe.steps(train)
        lines.append(f"# {name}: {train} training examples, {recipe.steps(train)} optimizer steps, {test} test examples")
    lines.append(f"# {total} optimizer steps in all")
    return "\n".join(lines) + "\n"
