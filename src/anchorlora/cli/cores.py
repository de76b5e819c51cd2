"""`anchorlora cores`: what to protect of an adapter that was trained elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorlora.cli.console import out, print_json
from anchorlora.cli.signals import stopping_at_once
from anchorlora.recipes import protocol

if TYPE_CHECKING:
    from anchorlora.audits.cores_from_text import MadeCores

COUNT = click.IntRange(min=1)


@click.command()
@click.argument("model")
@click.argument("adapter", type=click.Path(path_type=Path))
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--out", "file", required=True, type=click.Path(path_type=Path), help="Where the cores are written.")
@click.option("--column", metavar="NAME", help="The column to read; several, joined by commas, follow each other.")
@click.option("--limit", type=COUNT, metavar="N", help="Only the first N examples.")
@click.option(
    "--max-tokens", type=COUNT, metavar="N", default=protocol.MAX_TOKENS, show_default=True, help="Of each example, the first."
)
@click.option("--rows", type=COUNT, metavar="N", default=protocol.ROWS, show_default=True, help="Feature rows a layer input.")
@click.option("--spread", is_flag=True, help="Rows from all over the text.  [default: its first tokens, as the paper]")
@click.option(
    "--energy", type=float, metavar="SHARE", default=protocol.ENERGY, show_default=True, help="Of the rows' energy, in a core."
)
@click.option("--at-least", type=COUNT, metavar="N", default=protocol.AT_LEAST, show_default=True, help="Directions a core.")
@click.option("--at-most", type=COUNT, metavar="N", default=protocol.AT_MOST, show_default=True, help="Directions a core.")
@click.option("--device", default="auto", show_default=True, help="auto: the accelerator that torch finds, if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def cores(
    model: str,
    adapter: Path,
    data: Path,
    file: Path,
    column: str | None,
    limit: int | None,
    max_tokens: int,
    rows: int,
    spread: bool,
    energy: float,
    at_least: int,
    at_most: int,
    device: str,
    as_json: bool,
) -> None:
    """Make cores for a saved PEFT ADAPTER of MODEL (a folder or hub name) from a sample of its old task's text, DATA.

    DATA is .jsonl, .json, .csv, .parquet or a folder written by datasets, with columns messages, or prompt and completion, or text.
    """
    from transformers.utils import logging

    from anchorlora.audits.cores_from_text import cores_from_data

    logging.disable_progress_bar()  # of loading weights
    with stopping_at_once():
        found = cores_from_data(
            model,
            adapter,
            data,
            out=file,
            rows=rows,
            energy=energy,
            at_least=at_least,
            at_most=at_most,
            max_tokens=max_tokens,
            limit=limit,
            column=column,
            spread=spread,
            device=device,
        )
    if as_json:
        print_json({"file": str(file), "layers": found.stores, **found.origin})
    else:
        show(found)
        out.print(f"\ncores: {file}")


def show(found: MadeCores) -> None:
    """A line a store: the layers that share its rows, k, k*, retained energy, rows."""
    from tabulate import tabulate

    lines = []
    for store, made in found.origin["layers"].items():
        sharing = [layer.rsplit(".", 1)[-1] for layer, read in found.stores.items() if read == store and layer != store]
        energy = f"{100 * made['retained_energy']:.1f}"
        lines.append([", ".join([store, *sharing]), made["k"], made["k_star"] or "-", energy, made["rows"]])
    out.print(tabulate(lines, headers=["layer input", "k", "k*", "energy %", "rows"], disable_numparse=True))
    examples = found.origin["examples"]
    out.print(f"\nfrom {examples['used']} of {examples['given']} examples")
