"""`anchorlora cores`: protected subspaces for an adapter that was trained elsewhere."""

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
@click.option("--out", "file", required=True, type=click.Path(path_type=Path), help="The file to write.")
@click.option("--column", metavar="NAME", help="The column to read; several, joined by commas, are read in that order.")
@click.option("--limit", type=COUNT, metavar="N", help="Read only the first N examples.")
@click.option(
    "--max-tokens",
    type=COUNT,
    metavar="N",
    default=protocol.MAX_TOKENS,
    show_default=True,
    help="Read only the first N tokens of each example.",
)
@click.option("--rows", type=COUNT, metavar="N", default=protocol.ROWS, show_default=True, help="Feature rows per layer input.")
@click.option("--spread", is_flag=True, help="Sample rows from the whole text.  [default: its first tokens, as in the paper]")
@click.option(
    "--energy",
    type=float,
    metavar="SHARE",
    default=protocol.ENERGY,
    show_default=True,
    help="Share of the rows' energy that a core retains.",
)
@click.option(
    "--at-least", type=COUNT, metavar="N", default=protocol.AT_LEAST, show_default=True, help="Minimum directions per core."
)
@click.option(
    "--at-most", type=COUNT, metavar="N", default=protocol.AT_MOST, show_default=True, help="Maximum directions per core."
)
@click.option("--device", default="auto", show_default=True, help="A torch device; auto: an accelerator if there is one.")
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
    """Make the cores (protected subspaces) of a saved PEFT adapter.

    MODEL is a folder or a hub name, ADAPTER an adapter trained on it, and DATA a sample of the text that it was trained on: a
    .jsonl, .json, .csv, or .parquet file, or a folder written by datasets, with the columns messages, or prompt and completion,
    or text.
    """
    from transformers.utils import logging

    from anchorlora.audits.cores_from_text import cores_from_data

    logging.disable_progress_bar()  # while weights load
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
        print_json({"file": str(file), "tensors": found.stores, **found.origin})  # layer -> the tensor that holds its core
    else:
        show(found)
        out.print(f"\ncores: {file}")


def show(found: MadeCores) -> None:
    """Print one line per layer input: the layers that share it, k, k*, retained energy, and rows.

    Args:
        found: The cores.
    """
    from tabulate import tabulate

    lines = []
    for store, made in found.origin["layers"].items():
        sharing = [layer.rsplit(".", 1)[-1] for layer, read in found.stores.items() if read == store and layer != store]
        energy = f"{100 * made['retained_energy']:.1f}"
        lines.append([", ".join([store, *sharing]), made["k"], made["k_star"] or "-", energy, made["rows"]])
    out.print(tabulate(lines, headers=["layer input", "k", "k*", "energy %", "rows"], disable_numparse=True))
    examples = found.origin["examples"]
    out.print(f"\nfrom {examples['used']} of {examples['given']} examples")
