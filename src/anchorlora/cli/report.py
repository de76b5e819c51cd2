"""`anchorlora report`: tables, figures and a page from finished runs.  Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from anchorlora.cli.console import out


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", "to", required=True, type=click.Path(path_type=Path), help="The folder to write the report into.")
def report(folders: tuple[Path, ...], to: Path) -> None:
    """Make tables (text, Markdown, LaTeX, CSV), figures and one HTML page from run directories, or FOLDERS of them.

    Runs are reported by recipe, base model and tasks; mechanism traces apart. Cells that may not stand in one table are refused.
    """
    from anchorlora.reports.page import write_report
    from anchorlora.reports.records import find_runs

    runs = find_runs(folders)
    made = write_report(runs, to)
    for chapter in made.chapters:
        out.print(f"{chapter.title}\n")
        for table in chapter.main:
            out.print(table.text())
    out.print(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}; tables and figures in {to}, page: {made.page}")
