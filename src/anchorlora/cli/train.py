"""`anchorlora train`: teach a model a skill from a file, keep what it could do, and write the verdict."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorlora.cli.console import above_zero_option, count_option, err, example, fitted, hide_loading, out, path_option, print_json
from anchorlora.cli.options import ExecutionOptions, ReadsRows, execution_options, methods_beginning, settings_option, track
from anchorlora.text import amount

if TYPE_CHECKING:
    from anchorlora.train.folder import Answers
    from anchorlora.train.price import Price

SHOWN, LONGEST = 2, 160  # answers that are printed, and characters of each text


class Train(ReadsRows):
    """`train`, whose options are many."""

    groups = {  # noqa: RUF012
        "What to learn": ("data", "test", "columns", "metrics", "name"),
        "What to keep": ("keep", "after", "adapter", "keep_columns", "own", "margin", "budget"),
        "How to train": (
            *("epochs", "learning_rate", "rank", "max_length", "targets", "method", "same_size", "compare", "seed", "settings"),
        ),
        "This machine": ("dry_run", "save_every", "check_every", "allow_inexact"),
    }


@click.command(cls=Train, epilog=example("anchorlora train Qwen/Qwen3-0.6B --data new.jsonl --keep self --out runs/new"))
@click.argument("model")
@click.option("--data", required=True, metavar="NEW", help="Examples of the new skill.")
@click.option("--test", metavar="FILE", help="Examples to test on.  [default: every tenth of NEW, held out]")
@click.option("--adapter", metavar="OLD", help="The PEFT adapter that the model uses so far.  [default: none]")
@click.option(
    "--keep",
    metavar="WHAT",
    multiple=True,
    help="self (what the model writes itself), a file of old text, or an earlier --out; may be repeated.",
)
@click.option("--after", metavar="RUN", help="Continue from an earlier --out: train from its adapter, and keep all that it keeps.")
@path_option("--out", "to", required=True, metavar="DIR", help="The run directory.")
@click.option("--same-size", is_flag=True, help="The adapter does not grow: the old one is trained further, or folded.")
@click.option("--compare", is_flag=True, help="Train without protection as well, for comparison.")
@above_zero_option(
    "--budget",
    metavar="LOSS",
    help="Scale what is learned until the loss on kept text rises no more than this, per token; 0.05 is a start.  [default: none]",
)
@click.option(
    "--method",
    shell_complete=methods_beginning,
    help="A method (see `anchorlora methods`).  [default: fold-64; with --adapter inc-lora-hard, --same-size sfor]",
)
@click.option("--name", help="Name of the skill.  [default: the name of the file]")
@click.option(
    "--columns",
    metavar="PAIRS",
    help="Columns of NEW: question=MINE,answer=MINE; prompt=MINE,completion=MINE as they stand; or those of plain text."
    "  [default: by their names]",
)
@click.option("--keep-columns", metavar="PAIRS", help="The same for the files of --keep.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Metric for answers: exact_match, token_f1, rouge_l, ..; the first one is the primary.  [default: by the answers]",
)
@click.option(
    "--self-texts", "own", type=click.IntRange(min=10), metavar="N", default=72, show_default=True, help="Texts for --keep self."
)
@click.option(
    "--margin",
    type=click.FloatRange(min=0, max=100, min_open=True),
    metavar="POINTS",
    default=5.0,
    show_default=True,
    help="The largest drop of answers with which the verdict calls something kept.",
)
@count_option("--epochs", help="Passes over the examples.  [default: 2]")
@above_zero_option("--learning-rate", metavar="X", help="The highest learning rate of the schedule.  [default: 0.0005]")
@count_option("--rank", metavar="R", help="Rank of the new block; alpha stays 32 (--set alpha=N).  [default: 16]")
@click.option("--max-length", type=click.IntRange(min=2), metavar="N", help="Tokens of prompt and answer at most.  [default: 1024]")
@click.option("--targets", metavar="NAMES", help="Modules by name, or all-linear.  [default: all-linear]")
@click.option("--seed", type=int, metavar="N", default=42, show_default=True, help="Seed for everything random.")
@settings_option("FoldedPerTask.rank=48")
@track
@execution_options
@click.option("--dry-run", is_flag=True, help="Write nothing; print rows, steps, memory, and minutes as measured on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def train(
    model: str,
    adapter: str | None,
    to: Path,
    same_size: bool,
    method: str | None,
    metrics: tuple[str, ...],
    margin: float,
    targets: str | None,
    settings: tuple[str, ...],
    track: tuple[str, ...],
    execution: ExecutionOptions,
    dry_run: bool,
    as_json: bool,
    **others: Any,
) -> None:
    """Teach MODEL a skill, and keep what it can already do.

    MODEL is a folder or a hub name. NEW is a .jsonl, .json, .csv, or .parquet file, a folder written by datasets, or
    ORG/NAME:SPLIT from the hub. Its columns are one of: FORMS. The loss is on answers alone. No old data is needed: --keep self
    protects what the model writes itself. The command writes to DIR: adapter/ (one ordinary PEFT adapter), record.json, and
    index.html with the verdict. The same command resumes an interrupted run.
    """
    from anchorlora.cli.parsing import settings_of, targets_named
    from anchorlora.cli.progress import ProgressCallback
    from anchorlora.cli.signals import asked_to_stop
    from anchorlora.config import BaseModelSettings, base_model_of
    from anchorlora.errors import InvalidValue
    from anchorlora.methods import METHODS
    from anchorlora.pages.verdict import Evidence, advice, next_commands, write_verdict
    from anchorlora.runs.trackers import tracked
    from anchorlora.store.run_folder import RunFolder
    from anchorlora.train.folder import answers_of
    from anchorlora.train.judge import Margin
    from anchorlora.train.request import SETTING_OPTIONS, skill_request
    from anchorlora.train.sealed import changed_since
    from anchorlora.train.train import price_skill, train_skill

    fields, numbers = settings_of(settings)
    by_options = {field: others.pop(option.removeprefix("--").replace("-", "_")) for field, option in SETTING_OPTIONS.items()}
    given_by_options = {field: str(value) for field, value in by_options.items() if value is not None}
    for field in fields:
        if (name := field.rsplit(".", 1)[-1]) in given_by_options:
            raise InvalidValue(f"--set {field} is set by {SETTING_OPTIONS[name]}, too; give one of them")
    fields |= given_by_options
    own = {}
    for field in list(fields):
        name = field.removeprefix("base_model.")
        if name != "model" and name in BaseModelSettings.model_fields:
            own[name] = fields.pop(field)
    given = {
        **others,
        "base_model": base_model_of("--set", model=model, **own).model_dump(),
        "old_adapter": adapter,
        "metrics": metrics or None,
        "targets": None if targets is None else targets_named(targets),
        "settings": fields,
        "numbers": numbers,
    }
    request = skill_request(given, same_size=same_size, method=method, methods=METHODS)
    hide_loading()
    if dry_run:
        show_price(price_skill(request, to, methods=METHODS), as_json=as_json)
        return
    already = RunFolder(to).is_taught
    with (
        asked_to_stop(err.print) as stop,
        ProgressCallback(err, tasks=None) as bars,
        tracked(track, to, say=bars.on_warning) as trackers,
    ):
        verdict = train_skill(
            request,
            to,
            methods=METHODS,
            callbacks=[bars, *trackers],
            stop=stop,
            say=lambda message: None if already else err.print(f"{message} ..."),
            execution=vars(execution),
            margin=Margin(points=margin),
        ).as_dict()
    for file in changed_since(request, to) if already else ():
        err.print(f"{file} was changed since, and this is the verdict on what it held; to train on it, choose another --out")
    answers = answers_of(to, verdict)
    evidence = Evidence.of(to, answers)
    try:
        write_verdict(verdict, to / "index.html", evidence)
    except OSError:
        if not already:  # one that lies on a read-only disk is shown as it is
            raise
    if as_json:
        print_json(verdict)
        return
    for sentence in verdict["sentences"]:
        out.print(sentence)
    for part in answers[:1]:
        show_answers(part)
    for number, sentence in enumerate(advice(verdict, evidence)):
        out.print(f"{'' if number else chr(10)}try:     {sentence}")
    if already:
        out.print(f"\nfinished before, nothing was trained; record: {to / 'record.json'}")
    out.print(f"\nadapter: {to / 'adapter'}\nverdict: {to / 'index.html'}\nserve:   {verdict['serve']}")
    out.print(f"ask:     {next_commands(verdict)['ask it']}")


def show_price(price: Price, *, as_json: bool) -> None:
    """Print what teaching a skill will take."""
    if as_json:
        print_json({**asdict(price), "seconds": price.seconds})
        return
    for row in price.rows:
        use = {"learned": "to learn from", "tested": "to test on"}.get(row["use"], "to keep")
        out.print(f"{row['name']}: {amount(row['read'], 'row')} {use}, {row['held_out']:,} of them held out")
    out.print(
        f"training: {amount(price.tokens, 'token')} an epoch, {amount(price.steps, 'step')}; "
        f"about {price.memory / 2**30:.1f} GiB of memory\n"
    )
    out.print(fitted(["phase", "what", "minutes"], [[p.what, p.amount or "-", f"{p.seconds / 60:.1f}"] for p in price.phases]))
    minutes = f"about {amount(round(price.seconds / 60), 'minute')}" if price.seconds >= 60 else "less than a minute"
    out.print(f"\nin all {minutes} on {price.device}, as measured now; nothing was written")
    out.print("texts and answers that end early take less; the same command without --dry-run begins")


def show_answers(part: Answers) -> None:
    """Print the first answers before and after."""
    from anchorlora.pages.verdict import shortened

    out.print(f"\n{part.changed} of {amount(part.examples, 'held-out answer')} of {part.name} changed; the first examples:")
    for answer in part.shown[:SHOWN]:
        for what, text in (("asked", answer.prompt), ("before", answer.before), ("after", answer.after), ("right", answer.right)):
            line = shortened(" ".join(text.split()), LONGEST, middle=what == "asked") or "(nothing)"
            out.print(f"{'- ' if what == 'asked' else '  '}{what + ':':<8}{line}")
