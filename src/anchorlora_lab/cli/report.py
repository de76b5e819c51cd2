"""`anchorlora report`: tables, figures, and a page from finished runs.  Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from anchorlora.cli.console import example, out, titled


@click.command(epilog=example("anchorlora report runs/grid --out runs/report"))
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", "to", required=True, type=click.Path(path_type=Path), help="The folder for the report.")
@click.option("--printed/--no-printed", default=True, help="Show the paper's values next to ours, where they are comparable.")
def report(folders: tuple[Path, ...], to: Path, printed: bool) -> None:
    """Make tables, figures, and an HTML page from finished runs.

    FOLDERS are run directories, or folders that hold them. Tables are written as text, Markdown, LaTeX, and CSV, figures
    as PNG, PDF, and SVG. Runs are grouped by recipe, base model, and tasks; mechanism traces are reported separately. Runs that
    cannot share a table are refused. Runs of single tasks, and of the base model (learning rate 0), give rows beneath the scores.
    """
    from anchorlora_lab.report.page import write_report
    from anchorlora_lab.report.records import find_runs

    runs = find_runs(folders)
    made = write_report(runs, to, printed=printed)
    for chapter in made.chapters:
        out.print(f"{chapter.title}\n")
        for table in chapter.main:
            out.print(titled(table))
    out.print(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}; tables and figures in {to}, page: {made.page}")
