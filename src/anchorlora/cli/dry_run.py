"""Print what `--dry-run` says of runs: configuration, steps, sizes, and the time to expect.  Loads no weights, writes nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import click

from anchorlora.cli.console import above_zero_option, wrap
from anchorlora.config import Recipe, RunConfig
from anchorlora.data import Encoder, read_examples
from anchorlora.data.sources import source_of
from anchorlora.methods import Method
from anchorlora.runs.expected import in_words, measured_in_words, measured_rate, parts_of, work_of
from anchorlora.store.files import dump_yaml
from anchorlora.text import amount


def _finite(ctx: click.Context, option: click.Parameter, rate: float | None) -> float | None:
    if rate is not None and not math.isfinite(rate):
        raise click.BadParameter(f"{rate} is no rate; give operations per second, such as 400e12", ctx, option)
    return rate


flops_option = above_zero_option(
    "--flops",
    callback=_finite,
    metavar="RATE",
    help="With --dry-run: floating-point operations per second to expect, such as 400e12.  [default: measured, under a second]",
)
NO_MODEL = "no model yet; give one with --model"
NO_DATA = "no data folder yet; give one with --data"


def preview(config: RunConfig, method: Method, flops: float | None = None) -> Iterator[str]:
    """Return the configuration as YAML, with steps, sizes and the expected time as comments."""
    yield dump_yaml(config.model_dump(mode="json")).rstrip()
    recipe = config.recipe
    for note in [NO_DATA] if recipe.tasks.data is None else _steps(config):
        yield wrap(note, before="# ", after="# ")
    if recipe.base_model.model is None:
        yield f"# {NO_MODEL}"
        return
    from anchorlora.models.hub import cached_folder
    from anchorlora.runs.sizes import described, sizes  # imports torch

    folder = cached_folder(recipe.base_model)
    try:
        run_sizes = sizes(recipe, tasks=len(config.order), cumulative=method.plan.family == "cumulative", folder=folder)
    except ValueError as error:
        yield f"# sizes unknown: {error}"
        return
    for note in (*described(run_sizes), *estimate_time([config], None, flops)):
        yield wrap(note, before="# ", after="# ")


def estimate_time(configs: Sequence[RunConfig], at_a_time: int | None, flops: float | None = None) -> list[str]:
    """Return the expected time of runs as lines of text, or why it is unknown."""
    if not configs:
        return []
    recipes = {config.recipe.base_model.model: config.recipe for config in configs}
    if None in recipes:
        return [f"expected time unknown: {NO_MODEL}"]
    if any(config.recipe.tasks.data is None for config in configs):
        return [f"expected time unknown: {NO_DATA}"]
    from anchorlora.models.hub import cached_folder

    folders = {name: cached_folder(recipe.base_model) for name, recipe in recipes.items()}
    try:
        models = {name: _Model(recipe, folders[name]) for name, recipe in recipes.items()}
        works = []
        for config in configs:
            model = models[config.recipe.base_model.model]
            works.append(work_of(config.recipe, [model.parts(task) for task in config.order], model.sizes))
        first = models[configs[0].recipe.base_model.model]
        rate, how = (flops, "stated") if flops else first.rate(at_a_time or 1)
    except ValueError as error:
        return [f"expected time unknown: {error}"]
    return in_words(works, rate, how, first.device, at_a_time=at_a_time)


class _Model:
    """A base model by its files alone, and the sizes of tasks in its tokens."""

    def __init__(self, recipe: Recipe, folder: Path | None) -> None:
        from anchorlora.models.load import device_of, dtype_of
        from anchorlora.runs.sizes import sizes

        self.recipe, self.sizes = recipe, sizes(recipe, tasks=1, cumulative=False, folder=folder)
        self.device, self.dtype = device_of(recipe.base_model), dtype_of(recipe.base_model)
        self.parts = cache(partial(parts_of, recipe, source_of(recipe.tasks), _encoder(recipe, folder)))  # of a task, by its name

    def rate(self, at_a_time: int) -> tuple[float, str]:
        settings, threads = self.recipe.training, self.recipe.base_model.threads
        if at_a_time > 1 and self.device.type == "cpu":
            threads = threads or max(1, (os.cpu_count() or 1) // at_a_time)
        rows = max(1, settings.micro_batch * settings.max_tokens // 2)
        rate = measured_rate(self.device, self.dtype, self.sizes.product, rows=rows, threads=threads)
        return rate, measured_in_words(self.device, self.dtype)


def _encoder(recipe: Recipe, folder: Path | None) -> Encoder | None:
    """The encoder; None without a tokenizer, as for a configuration alone."""
    from anchorlora.models.load import tokenizer_of

    try:
        return Encoder(tokenizer_of(recipe.base_model, folder=folder), max_tokens=recipe.training.max_tokens)
    except ValueError:
        return None


def _steps(config: RunConfig) -> list[str]:
    recipe, source, lines, total = config.recipe, source_of(config.recipe.tasks), [], 0
    for name in config.order:
        train, test = (len(list(examples)) for examples in read_examples(source, recipe.tasks, name))
        total += recipe.steps(train)
        parts = ((train, "training example"), (recipe.steps(train), "optimizer step"), (test, "test example"))
        lines.append(f"{name}: {', '.join(amount(number, what) for number, what in parts)}")
    return [*lines, f"{amount(total, 'optimizer step')} in all"]
