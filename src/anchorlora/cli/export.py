"""`anchorlora export`: a trained adapter as a folder that is ready to serve or publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from anchorlora.cli.console import count_option, example, fitted, hide_loading, out, path_option
from anchorlora.cli.signals import stopping_at_once
from anchorlora.store.export import FORMS, Export
from anchorlora.text import shown


@click.command(epilog=example("anchorlora export runs/new --out out/adapter"))
@click.argument("folder", metavar="RUN_OR_TASK_DIR", type=click.Path(path_type=Path))
@path_option("--out", "to", required=True, help="The folder to write; it must not exist.")
@click.option("--form", type=click.Choice(FORMS), default="cat", show_default=True, help="The form to write.")
@count_option("--rank", metavar="R", help="The rank to reduce to; svd only.")
@click.option("--scale", type=float, default=1.0, show_default=True, help="What the last task's change is multiplied by.")
@click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16", "float16")),
    help="Type to write.  [default: float32 for an adapter, the base model's for merged weights]",
)
@click.option("--model", help="The base model.  [default: what the run or the adapter names]")
@click.option("--trust-remote-code", metavar="COMMIT", help="Run the model's own code, as of this commit; merged only.")
@click.option("--push", "repo", metavar="ORG/NAME", help="Push the export to this hub repository; run hf auth login first.")
@click.option("--json", "as_json", is_flag=True, help="Print export.json instead of a summary.")
def export(folder: Path, to: Path, model: str | None, repo: str | None, as_json: bool, **asked: Any) -> None:
    """Export an adapter, ready to serve or publish.

    RUN_OR_TASK_DIR is a run directory (its last finished task is exported), one of its tasks, or any PEFT adapter. There are three
    forms: cat is the exact adapter, of rank r t after t tasks of rank r; svd is the nearest adapter of a lower rank; merged is the
    base model's full weights with the update added. --scale 0.5 exports half of what the last task changed: of its fresh block, or
    of the difference to the adapter before it; of an adapter without a run, half of the whole. An adapter has one rank and one
    scale, as servers expect, and comes with the tokenizer. A model card states the error of the chosen form. The commands that
    serve the export are printed.
    """
    from anchorlora.export.export import Request, refuse_export
    from anchorlora.export.export import export as write
    from anchorlora.export.serving import commands, push, refuse_unnamed, stop_note
    from anchorlora.export.source import export_source
    from anchorlora.pages.card import card

    hide_loading()
    request = Request(**asked)
    if repo is not None:
        refuse_unnamed(repo)
    with stopping_at_once():
        refuse_export(to)
        source = export_source(folder, model=model)
        exported = write(source, request, to=to, card=card)
        if as_json:
            print(shown(exported.as_json()), end="")
        else:
            show(exported)
            out.print(f"\nexport: {to}")
            for what, line in commands(to, source.base_model.model, merged=exported.form == "merged").items():
                out.print(f"\n{what}:\n  {line}")
            if exported.stop_token_ids:
                out.print(f"\n{stop_note(exported.stop_token_ids)}, or use --form merged")
        if repo is not None:
            address = push(to, repo)
            if not as_json:
                out.print(f"\npushed: {address}")


def show(exported: Export) -> None:
    """Print what was written and what it cost."""
    source, base = exported.source, exported.base
    what = f"task {source.number} of {source.tasks} ({source.task})" if source.kind == "run" else "adapter"
    out.print(f"{what} exported as {exported.form}, {exported.dtype}" + (f", rank {exported.rank}" if exported.rank else ""))
    if exported.scale != 1:
        out.print(
            f"the change of the {'last task' if source.number and source.number > 1 else 'adapter'} is scaled by {exported.scale:g}"
        )
    if source.kind == "run" and not source.finished:
        out.print("the run is not finished: the model card has no scores")
    if exported.whole:
        out.print(f"whole weights come with it, as they were: {', '.join(exported.whole)}")
    if not base.hub:
        why = f"{base.name} is not the name of a model on the hub" if base.name else "the base model is unknown"
        out.print(f"the model card has no base_model ({why}); set it before publishing")
    if base.same is False:
        out.print("the base model is not the one the run was trained on: that one was quantized, or its files have other hashes")
    if not exported.tokenizer:
        out.print("there is no tokenizer next to the adapter: the base model cannot be read here; give its folder with --model")
    if exported.form != "cat" or exported.error:
        _costs(exported)
    if exported.form != "merged":
        _show_serving(exported)


def _costs(exported: Export) -> None:
    from anchorlora.pages.record import short_layers

    names = short_layers([layer.module for layer in exported.layers])
    rows = [(name, str(layer.rank), f"{layer.error:.1e}") for name, layer in zip(names, exported.layers, strict=True)]
    rows.append(("all layers", "", f"{exported.error:.1e}"))
    headings = ["layer", "rank", "relative error"]
    out.print("\n" + fitted(headings, rows))
    if kept := exported.protection:
        rho, stored = ("-" if value is None else f"{value:.1e}" for value in (kept.rho, kept.rho_exported))
        out.print(f"\nrho of task {kept.task}: {rho} as trained, {stored} as exported; numerical tolerance {kept.bound:.1e}")
    if drift := exported.logits:
        out.print(
            f"logits: changed by {drift.mean:.1e} on average and {drift.largest:.1e} at most; the adapter itself changes them by "
            f"{drift.typical:.1e} (rms); the most likely token changed at {100 * drift.changed:.2f}% of {drift.tokens} positions"
        )


def _show_serving(exported: Export) -> None:
    """Print how much of the protection is left in half precision, in which servers compute."""
    kept = exported.protection
    if kept is None:
        out.print(
            "\nservers round the factors to the model's type: bfloat16 moves a value by up to 2^-8 of it, float16 by 2^-11; "
            "serve in float16 if the base model allows it"
        )
        return
    half = {name: "-" if rho is None else f"{rho:.1e}" for name, rho in kept.served.items()}
    rho = "-" if kept.rho is None else f"{kept.rho:.1e}"
    out.print(
        f"\nservers round the factors to the model's type: rho of task {kept.task} goes from {rho} to {half['float16']} in float16 "
        f"and {half['bfloat16']} in bfloat16; serve in float16 if the base model allows it (vllm serve --dtype float16)"
    )
