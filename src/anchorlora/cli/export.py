"""`anchorlora export`: a run's adapter as a folder to serve or to publish."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from anchorlora.cli.console import out
from anchorlora.cli.signals import stopping_at_once
from anchorlora.schemas.export import FORMS
from anchorlora.schemas.text import shown

if TYPE_CHECKING:
    from anchorlora.schemas.export import Export


@click.command()
@click.argument("folder", metavar="RUN_OR_TASK_DIR", type=click.Path(path_type=Path))
@click.option("--out", "to", required=True, type=click.Path(path_type=Path), help="The folder to write; it must not exist.")
@click.option("--form", type=click.Choice(FORMS), default="cat", show_default=True, help="What to write.")
@click.option("--rank", type=click.IntRange(min=1), help="Of svd: the rank to reduce to.")
@click.option(
    "--dtype", type=click.Choice(("float32", "bfloat16", "float16")), help="Of merged weights.  [default: the base's own]"
)
@click.option("--model", help="The base model.  [default: what the run or the adapter names]")
@click.option("--trust-remote-code", metavar="COMMIT", help="Of merged: run the code that comes with the model, as of this commit.")
@click.option("--json", "as_json", is_flag=True, help="Print export.json.")
def export(
    folder: Path,
    to: Path,
    form: str,
    rank: int | None,
    dtype: str | None,
    model: str | None,
    trust_remote_code: str | None,
    as_json: bool,
) -> None:
    """Write an adapter ready to serve or publish, with a model card and what the form costs.

    RUN_OR_TASK_DIR is a run directory (its last finished task), one of its tasks, or the folder of a PEFT adapter made elsewhere.
    cat: the adapter as it is, exact, of rank r after one task and r t after t. svd: the nearest adapter of a lower rank, with the
    error of each layer. merged: the base's full weights with the update in them, with what the rounding costs.
    """
    from transformers.utils import logging

    from anchorlora.export.export import Request
    from anchorlora.export.export import export as write
    from anchorlora.reports.card import card

    logging.disable_progress_bar()
    request = Request(form, rank, dtype, model, trust_remote_code)  # type: ignore[arg-type]
    with stopping_at_once():
        found = write(folder, request, to=to, card=card)
    if as_json:
        print(shown(found.as_json()), end="")
        return
    show(found)
    out.print(f"\nexport: {to}")


def show(found: Export) -> None:
    """What was written and what it cost."""
    source, base = found.source, found.base
    what = f"task {source.number} of {source.tasks}, {source.task}" if source.kind == "run" else "an adapter"
    out.print(f"{what} as {found.form}, {found.dtype}" + (f", rank {found.rank}" if found.rank else ""))
    if found.asked_rank and found.rank and found.asked_rank > found.rank:
        out.print(f"rank {found.rank} holds everything; {found.asked_rank} would only add zeros")
    if source.kind == "run" and not source.finished:
        out.print("the run is not finished: the model card has no scores")
    if source.dtype != "F32":
        out.print(f"the factors are stored in {source.dtype} there; float32 holds the same values")
    if not base.hub:
        out.print(
            f"the model card names no base_model ({base.name or 'none known'} is no name of the hub); set it before publishing"
        )
    if base.same is False:
        out.print("the base is not what the run was trained on: that was quantized, or its files have other hashes")
    if found.form != "cat" or found.error:
        _costs(found)


def _costs(found: Export) -> None:
    from tabulate import tabulate

    from anchorlora.reports.labels import short_layers

    names = short_layers([layer.module for layer in found.layers])
    rows = [(name, str(layer.rank), f"{layer.error:.1e}") for name, layer in zip(names, found.layers, strict=True)]
    rows.append(("all layers", "", f"{found.error:.1e}"))
    headings = ["layer", "rank", "error / update"]
    out.print("\n" + tabulate(rows, headings, disable_numparse=True, colalign=("left", "right", "right")))
    if kept := found.protection:
        rho, stored = ("-" if value is None else f"{value:.1e}" for value in (kept.rho, kept.rho_exported))
        out.print(f"\nrho of task {kept.task}: {rho} as trained, {stored} as written; at most {kept.bound:.1e} counts as zero")
    if drift := found.logits:
        out.print(
            f"logits: {drift.mean:.1e} in the mean, {drift.largest:.1e} at most, beside {drift.typical:.1e} that the adapter does; "
            f"{100 * drift.changed:.2f}% of {drift.tokens} likeliest tokens changed"
        )
