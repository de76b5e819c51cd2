"""`anchorlora report`: tables, figures, and a page from finished runs.  Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorlora.cli.console import example, out, path_option, render_table
from anchorlora.errors import InvalidValue
from anchorlora.text import amount
from anchorlora_lab.cli.engines import split_list

if TYPE_CHECKING:
    from anchorlora_lab.report.layout import Spread


@click.command(epilog=example("anchorlora report runs/grid --out runs/report"))
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@path_option("--out", "to", required=True, help="The folder for the report.")
@click.option("--printed/--no-printed", default=True, help="Show the paper's values next to ours, where they are comparable.")
@click.option(
    "--columns",
    metavar="NAMES",
    help="Columns of the table of scores, comma-separated: AA, LA, BWT, FM, rho, seconds, MB, or tasks.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="HEADING=METHODS",
    help="A group of rows, such as 'Ours=mine,mine-2'; may be repeated. Other methods come after them.",
)
@click.option(
    "--reference", metavar="METHOD", help="Compare all methods with this one, instead of by the catalog's and the paper's pairs."
)
@click.option(
    "--spread",
    type=click.Choice(["none", "sd", "interval"]),
    help="What stands next to each mean.  [default: sd for a single order, and the interval of AA]",
)
def report(
    folders: tuple[Path, ...],
    to: Path,
    printed: bool,
    columns: str | None,
    groups: tuple[str, ...],
    reference: str | None,
    spread: Spread | None,
) -> None:
    """Make tables, figures, and an HTML page from finished runs.

    FOLDERS are run directories, or folders that hold them. Tables are written as text, Markdown, LaTeX, and CSV, figures
    as PNG, PDF, and SVG. Runs are grouped by recipe, base model, and tasks; mechanism traces are reported separately. Runs that
    cannot share a table are refused. Runs of single tasks, and of the base model (learning rate 0), give rows beneath the scores.
    """
    from anchorlora_lab.report.layout import Layout
    from anchorlora_lab.report.page import write_report
    from anchorlora_lab.report.records import find_runs

    layout = Layout(tuple(split_list(columns)) if columns is not None else (), _groups(groups), reference, spread)
    runs = find_runs(folders)
    made = write_report(runs, to, printed=printed, layout=layout)
    for chapter in made.chapters:
        out.print(f"{chapter.title}\n")
        for table in chapter.main:
            out.print(render_table(table))
    out.print(f"{amount(len(runs), 'run')}; tables and figures in {to}, page: {made.page}")


def _groups(words: Sequence[str]) -> dict[str, list[str]]:
    """The methods of each HEADING=METHODS."""
    groups: dict[str, list[str]] = {}
    for word in words:
        heading, equals, methods = word.partition("=")
        if not (heading.strip() and equals) or heading.strip() in groups:
            raise InvalidValue(f"--group takes a heading of its own and methods, 'Ours=mine,mine-2', not {word!r:.80}")
        groups[heading.strip()] = split_list(methods)
    return groups
