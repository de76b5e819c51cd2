"""`anchorlora run`: train one method on one order of tasks; with --dry-run, only show the configuration and the work it means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from anchorlora.cli import options
from anchorlora.cli.console import err, example, hide_loading, out, path_option, render_table
from anchorlora.cli.dry_run import flops_option, preview
from anchorlora.config import RunConfig
from anchorlora.errors import InvalidValue
from anchorlora.methods import Method
from anchorlora.processes import following
from anchorlora.store.run_folder import RunFolder
from anchorlora.text import shown


@click.command(
    short_help="Train on tasks in sequence, and measure protection.",
    epilog=example("anchorlora run mini --method sfor --order order1 --seed 42 --out runs/sfor"),
)
@options.recipe_argument
@click.option(
    "--method", shell_complete=options.methods_beginning, help="A method (see `anchorlora methods`), or file.py:variable."
)
@click.option(
    "--order", help="An order of the recipe, or comma-separated tasks.  [default: the first order; for your own files: all tasks]"
)
@click.option("--seed", type=int, help="The paper uses 38, 42, and 2026.  [default: 42]")
@path_option("--out", "to", help="The run directory.")
@options.recipe_options
@path_option("--selection", help="A selection.json; the method uses the value chosen there.")
@options.track
@options.execution_options(together=True)
@click.option(
    "--dry-run", is_flag=True, help="Print the resolved configuration, step counts, sizes, and expected time; write nothing."
)
@flops_option
def run(
    recipe: str,
    method: str | None,
    order: str | None,
    seed: int | None,
    to: Path | None,
    model: str | None,
    data: str | None,
    settings: tuple[str, ...],
    selection: Path | None,
    track: tuple[str, ...],
    execution: options.ExecutionOptions,
    dry_run: bool,
    flops: float | None,
) -> None:
    """Train on tasks in sequence, and measure how well earlier ones are protected.

    RECIPE is mini, standard-cl, long-sequence, qwen3-8b, mistral-7b, or a YAML file, such as the config.yaml of a run. The same
    command resumes an interrupted run. Ctrl-C, SIGTERM, and SIGUSR1 save and stop after the current step (exit status 75).
    """
    from anchorlora.cli.parsing import method_named, order_named, recipe_of_options

    chosen, stored, numbers = recipe_of_options(recipe, settings, model, data)
    if method is None and stored is not None and ":" in stored.method:
        raise InvalidValue(
            f"{recipe} names a method from a Python file, which is never run without asking; read the file, and if you trust it, "
            f"add --method {stored.method}"
        )
    method = method or (stored.method if stored else None)
    if method is None:
        raise InvalidValue("no method given; choose one with --method (anchorlora methods lists them)")
    same = stored is not None and stored.method == method
    how = method_named(method)
    tasks = stored.order if stored and not order else order_named(order, chosen)
    config = RunConfig(
        method=method,
        settings=stored.settings if stored and same else {},
        selection=stored.selection if stored and same else None,
        order=tasks,
        seed=seed if seed is not None else stored.seed if stored else 42,
        recipe=chosen,
    )
    config = tuned(config, numbers, selection)
    how.changed(config.settings)
    if dry_run:
        for line in preview(config, how, flops):
            print(shown(line), flush=True)
        return
    if to is None:
        raise InvalidValue("no run directory given; choose one with --out")
    _train(config, how, to, execution, track)


def tuned(config: RunConfig, numbers: dict[str, float], selection: Path | None) -> RunConfig:
    """Return the configuration with numbers of its method set, by hand or by a selection.json."""
    if selection is not None:
        from anchorlora.store.selection import read_selection

        manifest = read_selection(selection)
        if manifest.method != config.method:
            raise InvalidValue(f"{selection} was made for {manifest.method}, not for {config.method}; run anchorlora select for it")
        config = config.model_copy(update={"settings": manifest.settings, "selection": manifest.sha256})
    for name, value in numbers.items():
        if config.selection is not None and config.settings.get(name, value) != value:
            raise InvalidValue(
                f"{name} was selected on the holdout as {config.settings[name]:g}, so {value:g} is refused; "
                "leave out --set or --selection"
            )
    return config.model_copy(update={"settings": {**config.settings, **numbers}})


def _train(config: RunConfig, how: Method, to: Path, execution: options.ExecutionOptions, track: Sequence[str]) -> None:
    from anchorlora.cli.progress import ProgressCallback
    from anchorlora.cli.signals import asked_to_stop
    from anchorlora.pages.record import drift_table, triangle_table
    from anchorlora.runs.provenance import changed_data
    from anchorlora.runs.run import run_sequence
    from anchorlora.runs.trackers import tracked

    hide_loading()
    common: dict[str, Any] = {name: getattr(config, name) for name in ("order", "seed", "settings", "selection")}
    common |= {"out": to, "name": config.method, **vars(execution)}
    if following():  # the first process speaks for all
        with asked_to_stop(lambda message: None) as stop:
            run_sequence(config.recipe, how, stop=stop, **common)
        return
    folder = RunFolder(to)
    already = folder.is_finished
    with asked_to_stop(err.print) as stop:
        with ProgressCallback(err, tasks=len(config.order)) as bars, tracked(track, to, say=bars.on_warning) as trackers:
            record = run_sequence(config.recipe, how, callbacks=[bars, *trackers], stop=stop, **common)
        for file in changed_data(record, config.recipe) if already else ():
            err.print(f"{file} was changed since, and this is the record of what it held; to train on it, choose another --out")
        for table in (triangle_table(record), drift_table([record])):
            out.print(render_table(table))
        scores = record.scores.model_dump().items()
        out.print("   ".join(f"{name} {'-' if value is None else format(value, '.2f')}" for name, value in scores))
        out.print(f"\n{'finished before, nothing was trained; ' if already else ''}record: {folder.record_file}")
