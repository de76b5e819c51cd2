"""`anchorlora report`: tables, figures and a page from finished runs.  Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from anchorlora.cli.app import app, out


@app.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Path(path_type=Path), help="The folder to write the report into.")
def report(folders: tuple[Path, ...], to: Path) -> None:
    """Make tables (text, Markdown, LaTeX, CSV), figures and one HTML page from run directories, or FOLDERS of them."""
    from anchorlora.reports.page import write_report
    from anchorlora.reports.records import find_runs
    from anchorlora.reports.tables import main_table

    runs = find_runs(folders)
    page = write_report(runs, to)
    out.print(main_table(runs).text())
    out.print(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}; tables and figures in {to}, page: {page}")
