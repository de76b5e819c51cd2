"""`anchorlora eval`: scores on public benchmarks and on the user's own prompts, before and after training."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from anchorlora.cli.console import count_option, err, example, fitted, out, path_option
from anchorlora.cli.options import ReadsRows
from anchorlora.cli.signals import stopping_at_once
from anchorlora.errors import Failed, InvalidValue
from anchorlora.text import shown
from anchorlora_lab.suites.evaluation import Evaluation, Flips, Score, TaskChange

WORST = 5  # parts, and prompts, that are listed


@click.command("eval", cls=ReadsRows, epilog=example("anchorlora eval runs/new --prompts questions.jsonl"))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--model", help="The base model.  [default: what the run or the adapter names]")
@click.option("--trust-remote-code", metavar="COMMIT", help="Run the model's own code, as of this commit.  [default: run none]")
@path_option("--data", help="A local MMLU folder with dev and test; turns off network access.")
@click.option(
    "--task", multiple=True, metavar="T,..", help="Comma-separated lm_eval tasks or task files; may be repeated.  [default: mmlu]"
)
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="S,..",
    help="Named sets of tasks, asked together: forgetting (MMLU, ARC, HellaSwag, Winogrande, TruthfulQA, GSM8K, IFEval), knowledge "
    "(MMLU, ARC, TruthfulQA), reasoning (HellaSwag, Winogrande, GSM8K); may be repeated.",
)
@path_option(
    "--prompts",
    metavar="FILE",
    help="Your own prompts with their answers, compared by exact match. Columns are one of: FORMS; text alone asks nothing.",
)
@count_option("--limit", help="Ask only the first N questions of each task, or of each MMLU subject.")
@click.option(
    "--num-fewshot",
    type=click.IntRange(min=0),
    metavar="N",
    help="Solved examples before each question.  [default: the task's own]",
)
@click.option("--apply-chat-template", is_flag=True, help="Ask through the tokenizer's chat template.")
@count_option("--batch", default=8, show_default=True, help="Inputs per forward pass.")
@click.option(
    "--fail-if-drop",
    type=click.FloatRange(min=0),
    metavar="POINTS",
    help="Exit with status 1 if a task's score drops by more than POINTS, or if it cannot show that it does not.",
)
@path_option("--cache", help="Where base-model scores are cached.  [default: ~/.cache/anchorlora]")
@click.option("--force", is_flag=True, help="Measure again and replace an existing eval.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval_(
    folder: Path,
    model: str | None,
    trust_remote_code: str | None,
    task: tuple[str, ...],
    suites: tuple[str, ...],
    fail_if_drop: float | None,
    cache: Path | None,
    force: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Measure general capability before and after training.

    The benchmarks are MMLU, or any other tasks of lm-evaluation-harness whose metric is a fraction. DIR is a finished run, one of
    its tasks, or a saved PEFT adapter. Writes DIR/eval.json. If that file already answers the same request, it is only printed. The
    scores of the base model are measured once and cached.
    """
    if fail_if_drop is not None and not math.isfinite(fail_if_drop):
        raise InvalidValue(f"--fail-if-drop takes percentage points, not {fail_if_drop}")
    from anchorlora_lab.suites.questions import EvalProgress, Questions, task_names

    questions = Questions(task_names(task, suites=suites, prompts=asked["prompts"] is not None), **asked)
    if questions.data is not None:
        from anchorlora_lab.suites.mmlu import go_offline

        go_offline()
    from transformers.utils import logging

    from anchorlora_lab.cli.progress import bar_over
    from anchorlora_lab.suites.measure import cache_folder, evaluate

    logging.disable_progress_bar()  # while weights load; ours follow
    bar = bar_over(err)
    with stopping_at_once(), bar if err.is_terminal else nullcontext():  # older rich ends with an empty line elsewhere
        how: dict[str, Any] = {"model": model, "trust_remote_code": trust_remote_code, "force": force}
        evaluation = evaluate(folder, questions, cache=cache or cache_folder(), watch=EvalProgress(bar, err.print), **how)
    if as_json:
        print(shown(evaluation.as_json()), end="")
    else:
        show(evaluation)
        out.print(f"\neval: {folder / 'eval.json'}")
    if fail_if_drop is not None:
        gate(evaluation, fail_if_drop)


def gate(evaluation: Evaluation, points: float) -> None:
    """Refuse an evaluation with a task that fell too far, or that cannot show that it did not."""
    dropped = evaluation.dropped(points)
    fallen = "; ".join(f"{task.task} {task.fall}" for task in dropped)
    reasons = [f"{fallen}: more than the {points:g} allowed"] if dropped else []
    reasons += [f"{task.task} shows nothing: {why}" for task in evaluation.tasks if (why := task.cannot_tell(points))]
    if reasons:
        raise Failed("; ".join(reasons))


def show(evaluation: Evaluation) -> None:
    """Print each task before and after, its change, the answers that flipped, and the parts that dropped most."""
    rows = [[t.task, t.metric, str(t.n), *_scores(t), *_flips(t.flips)] for t in evaluation.tasks]
    if len(rows) > 1:
        rows.append([f"mean of {len(rows)} tasks", "", str(evaluation.n), *_scores(evaluation), "", ""])
    headings = ["task", "metric", "n", "base", "after", "change", "right to wrong", "wrong to right"]
    out.print(fitted(headings, rows))
    out.print("\nPercent, with standard errors; that of the change is over pairs of answers to the same question.")
    drops = evaluation.largest_drops(WORST)
    if drops:
        parts = [[name, str(p.n), f"{p.base:.2f}", f"{p.after:.2f}", f"{p.after - p.base:+.2f}"] for name, p in drops]
        out.print("\n" + fitted(["largest drops", "n", "base", "after", "change"], parts))
    if evaluation.prompts and evaluation.prompts.right_to_wrong:
        lost = [[flip.place, flip.answer, flip.base, flip.after] for flip in evaluation.prompts.right_to_wrong[:WORST]]
        wide = [[f"{' '.join(text.split()):.40}" if i else text for i, text in enumerate(row)] for row in lost]
        out.print("\n" + fitted(["right to wrong", "answer", "base", "after"], wide))
    if evaluation.cut:
        out.print(f"\ninputs truncated on the left to fit the model's context: {evaluation.cut}")


def _scores(change: TaskChange | Evaluation) -> list[str]:
    error = "" if change.change_stderr is None else f" ± {change.change_stderr:.2f}"
    return [_plus_minus(change.base), _plus_minus(change.after), f"{change.change:+.2f}{error}"]


def _flips(flips: Flips | None) -> list[str]:
    return ["", ""] if flips is None else [str(flips.right_to_wrong), str(flips.wrong_to_right)]


def _plus_minus(score: Score) -> str:
    return f"{score.score:.2f}" if score.stderr is None else f"{score.score:.2f} ± {score.stderr:.2f}"
