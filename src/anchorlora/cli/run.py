"""`anchorlora run`: one method over one order of tasks."""

from __future__ import annotations

from pathlib import Path

import click

from anchorlora.cli.app import app, err, out


@app.command()
@click.argument("recipe")
@click.option("--method", help="A method (see `anchorlora methods`), or file.py:variable.")
@click.option("--order", help="order1, order2, order3, or a comma list of tasks.  [default: order1]")
@click.option("--seed", type=int, help="The study uses 38, 42 and 2026.  [default: 42]")
@click.option("--out", "to", type=click.Path(path_type=Path), help="The run directory.")
@click.option("--model", help="A model folder or hub name.")
@click.option("--data", help="A CL_Benchmark folder.")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Change a field of the recipe; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and step counts; write nothing.")
def run(
    recipe: str,
    method: str | None,
    order: str | None,
    seed: int | None,
    to: Path | None,
    model: str | None,
    data: str | None,
    settings: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Learn tasks in sequence, protect what was learned, and measure whether it held.

    RECIPE is mini, standard-cl, or a YAML file, such as the config.yaml of a run. Called again for the same directory, the
    command goes on at the first unfinished task.
    """
    from anchorlora.cli.choices import method_named, order_named, recipe_named, settings_of

    chosen, stored = recipe_named(recipe)
    changes = settings_of(settings)
    changes |= {name: value for name, value in (("model", model), ("data", data)) if value is not None}
    chosen = chosen.changed(changes) if changes else chosen
    method = method or (stored.method if stored else None)
    if method is None:
        raise ValueError("no method given; choose one with --method (anchorlora methods lists them)")
    how = method_named(method)
    tasks = order_named(order, chosen) if order else stored.order if stored else order_named("order1", chosen)
    number = seed if seed is not None else stored.seed if stored else 42
    if dry_run:
        from anchorlora.cli.preview import preview

        print(preview(chosen, method, tasks, number), end="")
        return
    if to is None:
        raise ValueError("no run directory given; choose one with --out")
    from transformers.utils import logging

    from anchorlora.cli.progress import Bars
    from anchorlora.experiments.run import run_sequence
    from anchorlora.reports.records import Run
    from anchorlora.reports.tables import drift_table, triangle_table

    logging.disable_progress_bar()  # of loading weights; ours follow
    with Bars(err, tasks=len(tasks)) as bars:
        record = run_sequence(chosen, how, order=tasks, seed=number, out=to, name=method, watch=bars)
    finished = Run(to, record)
    for table in (triangle_table(finished), drift_table([finished])):
        out.print(table.text())
    scores = record.scores.model_dump().items()
    out.print("   ".join(f"{name} {'-' if value is None else format(value, '.2f')}" for name, value in scores))
    out.print(f"\nrecord: {to / 'record.json'}")
