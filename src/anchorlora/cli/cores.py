"""`anchorlora cores`: protected subspaces of a model, with or without an adapter that was trained elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorlora.cli.console import count_option, example, fitted, hide_loading, out, path_option, print_json
from anchorlora.cli.options import ReadsRows
from anchorlora.cli.signals import stopping_at_once
from anchorlora.errors import InvalidValue
from anchorlora.recipes import protocol
from anchorlora.text import amount

if TYPE_CHECKING:
    from anchorlora.models.cores_from_text import MadeCores


@click.command(
    cls=ReadsRows,
    short_help="Make cores (protected subspaces) from text.",
    epilog=example("anchorlora cores Qwen/Qwen3-0.6B old.jsonl --out old-cores.safetensors"),
)
@click.argument("model")
@click.argument("adapter_data", metavar="[ADAPTER] [DATA]", nargs=-1)
@count_option("--self", "own", help="Instead of DATA: N texts that the model writes itself.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of those texts.")
@click.option("--targets", metavar="NAMES", help="Without ADAPTER: modules by name, or all-linear.  [default: the usual ones]")
@path_option("--out", "file", required=True, help="The file to write.")
@click.option(
    "--columns", "column", metavar="NAMES", help="The columns to read, comma-separated and in this order; or prompt=MINE,.."
)
@count_option("--limit", help="Read only the first N examples.")
@count_option("--max-tokens", default=protocol.MAX_TOKENS, show_default=True, help="Read only the first N tokens of each example.")
@count_option("--rows", default=protocol.ROWS, show_default=True, help="Feature rows per layer input.")
@click.option("--spread", is_flag=True, help="Sample rows from the whole text.  [default: its first tokens, as in the paper]")
@click.option(
    "--energy",
    type=float,
    metavar="SHARE",
    default=protocol.ENERGY,
    show_default=True,
    help="Share of the rows' energy (squared singular values) that a core retains.",
)
@count_option("--at-least", default=protocol.AT_LEAST, show_default=True, help="Minimum directions per core.")
@count_option("--at-most", default=protocol.AT_MOST, show_default=True, help="Maximum directions per core.")
@click.option("--device", default="auto", show_default=True, help="A torch device; auto: an accelerator, if available.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def cores(
    model: str,
    adapter_data: tuple[str, ...],
    own: int | None,
    seed: int,
    targets: str | None,
    file: Path,
    column: str | None,
    limit: int | None,
    device: str,
    as_json: bool,
    **rule: Any,
) -> None:
    """Make the cores (protected subspaces) of a model, or of a saved PEFT adapter on it.

    MODEL is a folder or a hub name, ADAPTER an adapter trained on it, and DATA a sample of text that shows what to protect: a
    .jsonl, .json, .csv, or .parquet file, a folder written by datasets, or ORG/NAME:SPLIT from the hub. Its columns are one
    of: FORMS.
    """
    from anchorlora.cli.parsing import targets_named
    from anchorlora.models.cores_from_text import CoreRule, cores_from_data

    adapter, data = _told_apart(adapter_data, own)
    if adapter is not None and targets is not None:
        raise InvalidValue(f"--targets {targets} is for a model alone: the layers of {adapter} are given")

    hide_loading()
    with stopping_at_once():
        made_cores = cores_from_data(
            model,
            adapter,
            data,
            own=own,
            seed=seed,
            targets=None if targets is None else targets_named(targets),
            out=file,
            rule=CoreRule(**rule),
            limit=limit,
            column=column,
            device=device,
        )
    if as_json:
        print_json({"file": str(file), "tensors": made_cores.stores, **made_cores.origin})  # tensors: layer -> that of its core
    else:
        show(made_cores)
        out.print(f"\ncores: {file}")


def _told_apart(places: tuple[str, ...], own: int | None) -> tuple[Path | None, Path | str | None]:
    """The adapter and the data, of which either may be missing."""
    most, wanted = (2, "an ADAPTER and DATA at most") if own is None else (1, "an ADAPTER at most, since --self is given")
    if len(places) > most:
        raise InvalidValue(f"after the model there are {len(places)} arguments; give {wanted}")
    if own is None and not places:
        raise InvalidValue("there is no text: give DATA, or --self N for text that the model writes itself")
    adapter, data = (places, None) if own is not None else (places[:-1], places[-1])
    return Path(adapter[0]) if adapter else None, data


def show(made_cores: MadeCores) -> None:
    """Print one line per layer input: the layers that share it, k, k*, retained energy, and rows."""
    lines = []
    for store, made in made_cores.origin["layers"].items():
        sharing = [layer.rsplit(".", 1)[-1] for layer, read in made_cores.stores.items() if read == store and layer != store]
        energy = f"{100 * made['retained_energy']:.1f}"
        lines.append([", ".join([store, *sharing]), str(made["k"]), str(made["k_star"] or "-"), energy, str(made["rows"])])
    out.print(fitted(["layer input", "k", "k*", "energy %", "rows"], lines))
    examples = made_cores.origin["examples"]
    which = f"texts of its own, seed {examples['seed']}" if "own" in examples else "examples"
    out.print(f"\nfrom {examples['used']} of {examples['given']} {which}")
    if capped := cap_in_words(made_cores.origin["layers"], made_cores.origin["rule"]):
        out.print(capped)


def cap_in_words(layers: dict[str, dict[str, Any]], rule: dict[str, Any]) -> str | None:
    """Return what the limit on directions costs; None where every core holds the energy that was asked for."""
    short = {layer: made for layer, made in layers.items() if made["retained_energy"] < rule["energy"] - 1e-9}
    if not short:
        return None
    worst, made = min(short.items(), key=lambda item: item[1]["retained_energy"])
    asked = [core["k_star"] for core in short.values() if core["k_star"]]
    remedy = f"--at-most {max(asked)} would hold it" if len(asked) == len(short) else "more rows are needed to hold it"
    return (
        f"warning: at {len(short)} of {amount(len(layers), 'layer input')} the limit of {amount(rule['at_most'], 'direction')} "
        "holds less than the "
        f"{100 * rule['energy']:.0f} % of energy asked for (least: {100 * made['retained_energy']:.0f} % at {worst}); {remedy}"
    )
