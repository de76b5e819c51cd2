"""`anchorlora eval`: scores on public benchmarks before and after training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorlora.cli.console import err, out
from anchorlora.cli.signals import stopping_at_once
from anchorlora.errors import Failed, InvalidValue
from anchorlora.schemas.text import shown

if TYPE_CHECKING:
    from anchorlora.schemas.eval import Evaluation, Score


WORST = 5  # parts that are listed


@click.command("eval")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--model", help="The base model.  [default: what the run or the adapter names]")
@click.option("--trust-remote-code", metavar="COMMIT", help="Run the model's own code, as of this commit.  [default: run none]")
@click.option("--data", type=click.Path(path_type=Path), help="A local MMLU folder with dev and test; turns off network access.")
@click.option("--task", default="mmlu", show_default=True, help="An lm_eval task, or a comma list.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Ask only the first N questions of each task, or of each MMLU subject."
)
@click.option(
    "--few-shot",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Solved examples before each question.",
)
@click.option("--batch", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="Inputs per forward pass.")
@click.option(
    "--fail-if-drop", type=click.FloatRange(min=0), metavar="POINTS", help="Exit with status 1 if the score drops by more."
)
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Where scores of base models are kept.  [default: ~/.cache/anchorlora]"
)
@click.option("--force", is_flag=True, help="Measure again and replace an existing eval.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval_(
    folder: Path,
    model: str | None,
    trust_remote_code: str | None,
    data: Path | None,
    task: str,
    limit: int | None,
    few_shot: int,
    batch: int,
    fail_if_drop: float | None,
    cache: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Measure general capability before and after training.

    The benchmark is zero-shot MMLU, or any other task of lm-evaluation-harness. DIR is a finished run or a saved PEFT adapter.
    Writes DIR/eval.json; an existing one that answers the same request is only printed. The score of the base model is measured
    once and cached.
    """
    if fail_if_drop is not None and not math.isfinite(fail_if_drop):
        raise InvalidValue(f"--fail-if-drop takes percentage points, not {fail_if_drop}")
    if data is not None:
        from anchorlora.capability.mmlu import go_offline

        go_offline()
    from transformers.utils import logging

    from anchorlora.capability.cache import cache_folder
    from anchorlora.capability.measure import Questions, evaluate

    logging.disable_progress_bar()  # while weights load; ours follow
    names = tuple(name.strip() for name in task.split(",") if name.strip())
    questions = Questions(names, data=data, limit=limit, few_shot=few_shot, batch=batch)
    with stopping_at_once(), Counter() as counter:
        found = evaluate(
            folder,
            questions,
            cache=cache or cache_folder(),
            model=model,
            trust_remote_code=trust_remote_code,
            force=force,
            watch=counter,
        )
    if as_json:
        print(shown(found.as_json()), end="")
    else:
        show(found)
        out.print(f"\neval: {folder / 'eval.json'}")
    if fail_if_drop is not None and found.dropped(fail_if_drop):
        raise Failed(f"{found.task} fell by {-found.change:.2f} points, more than the {fail_if_drop:g} allowed")


def show(found: Evaluation) -> None:
    """Print the scores before and after, their change, and the parts that dropped most.

    Args:
        found: An evaluation.
    """
    from tabulate import tabulate

    row = [found.task, found.metric, found.n, _plus_minus(found.base), _plus_minus(found.after), f"{found.change:+.2f}"]
    out.print(tabulate([row], headers=["task", "metric", "n", "base", "after", "change"], disable_numparse=True))
    drops = found.largest_drops(WORST)
    if drops:
        rows = [[name, p.n, f"{p.base:.2f}", f"{p.after:.2f}", f"{p.after - p.base:+.2f}"] for name, p in drops]
        out.print("\n" + tabulate(rows, headers=["largest drops", "n", "base", "after", "change"], disable_numparse=True))
    if found.cut:
        out.print(f"\ninputs truncated on the left to fit the model's context: {found.cut}")


def _plus_minus(score: Score) -> str:
    return f"{score.score:.2f}" if score.stderr is None else f"{score.score:.2f} ± {score.stderr:.2f}"


class Counter:
    """A progress bar with the remaining time while a model is evaluated; only notes if stderr is not a terminal.  Use in `with`."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        columns += [TextColumn("remaining"), TimeRemainingColumn()]
        self.progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.bar: Any = None
        self.what = ""

    def __enter__(self) -> Counter:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def measures(self, what: str) -> None:
        """Note which model is evaluated next.

        Args:
            what: "without the adapter" or "with the adapter".
        """
        self.what = what

    def begins(self, inputs: int) -> None:
        """Start a new bar.

        Args:
            inputs: How many inputs follow.
        """
        if self.bar is not None:
            self.progress.remove_task(self.bar)
        self.bar = self.progress.add_task(f"evaluating {self.what}", total=inputs)

    def advance(self, inputs: int) -> None:
        """Move the bar.

        Args:
            inputs: How many inputs have been read since.
        """
        self.progress.update(self.bar, advance=inputs)

    def note(self, line: str) -> None:
        """Print a line on stderr.

        Args:
            line: The line.
        """
        err.print(line)
