"""Render the verdict on a skill as one HTML page: what became of it first, answers, then the evidence."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from anchorlora.pages.audit import percent
from anchorlora.pages.html import templates
from anchorlora.scores import LEAST_PAIRS, MOST_PROBES, metric_in_words
from anchorlora.store.files import write_text
from anchorlora.store.log import read_events
from anchorlora.store.run_folder import RunFolder
from anchorlora.text import amount

PROMPT, ANSWER = 400, 300  # characters of a text that are shown
STEPS = 200  # points of the loss curve at most


@dataclass(frozen=True)
class Evidence:
    """Answers and losses that a page shows beside a verdict."""

    answers: Sequence[Any] = ()  # `anchorlora.train.folder.Answers`, of the skill first
    losses: Sequence[tuple[int, float]] = ()  # optimizer step and the loss of its examples, per token
    epochs: int | None = None
    learning_rate: float | None = None
    test_limit: int | None = None  # rows of a test file that are read

    @classmethod
    def of(cls, out: Path, answers: Sequence[Any]) -> Evidence:
        """Return the evidence in a run directory."""
        run = RunFolder(out)
        events = read_events(run.log_file) if run.log_file.is_file() else []
        losses = [(e["step"], e["loss"]) for e in events if e.get("event") == "step" and isinstance(e.get("loss"), float)]
        recipe = run.read_config().recipe
        return cls(answers, losses, recipe.training.epochs, recipe.training.learning_rate, recipe.tasks.test_limit)


NOTHING = Evidence()


def write_verdict(verdict: Mapping[str, Any], path: Path, evidence: Evidence = NOTHING) -> None:
    """Write the page of a verdict; an older one is replaced."""
    write_text(path, render(verdict, evidence))


def render(verdict: Mapping[str, Any], evidence: Evidence = NOTHING) -> str:
    """Return the page as HTML. Text from files is escaped, and the page loads nothing."""
    environment = templates()
    environment.filters |= {"percent": percent, "signed": signed, "shortened": shortened, "metric": metric_in_words, "mark": mark}
    environment.filters["amount"] = amount
    return environment.get_template("verdict.html.j2").render(
        verdict=verdict,
        rows=_rows(verdict),
        answers=evidence.answers,
        curve=loss_curve(evidence.losses),
        advice=list(advice(verdict, evidence)),
        commands=next_commands(verdict),
        limits={"prompt": PROMPT, "answer": ANSWER},
        least=LEAST_PAIRS,
    )


def signed(value: float, digits: int = 3) -> str:
    """Return a change with its sign."""
    return f"{value:+.{digits}f}"


def mark(score: float) -> str:
    """Return how near an answer is to the right one, in a word or in percent."""
    return "right" if score == 1 else "wrong" if score == 0 else f"{100 * score:.0f} % like it"


def shortened(text: str, most: int, *, middle: bool = False) -> str:
    """Return a text of at most so many characters, with an ellipsis where it is cut: at its end, or in the middle."""
    text = text.strip()
    if len(text) <= most:
        return text
    head = most // 3 if middle else most - 1
    tail = most - 1 - head
    return text[:head].rstrip() + "…" + (text[-tail:].lstrip() if tail else "")


def next_commands(verdict: Mapping[str, Any]) -> dict[str, str]:
    """Return what to do with an adapter and the command that does it."""
    out = Path(verdict["adapter"]).parent.as_posix()  # which every shell takes without quotes
    run, model = shlex.quote(out), shlex.quote(str(verdict["model"]))
    return {
        "ask it": f'anchorlora ask {run} "your question" --without',
        "export it, to serve or to publish": f"anchorlora export {run} --out {shlex.quote(f'{out}-export')}",
        "serve it": str(verdict["serve"]),
        "teach the next skill": f"anchorlora train {model} --after {run} --data next.jsonl --out {shlex.quote(f'{out}-next')}",
    }


def advice(verdict: Mapping[str, Any], evidence: Evidence) -> Iterator[str]:
    """Yield what to try where a skill was not learned, or something was not kept."""
    skill, title = verdict["skill"], verdict.get("title") or verdict["name"]
    rate, epochs = evidence.learning_rate, evidence.epochs
    again, less = "", "; it may keep less" if verdict["kept"] else ""
    if rate and epochs:
        again = f"--epochs {2 * epochs} (it was {epochs}), or --learning-rate {2 * rate:g} (it was {rate:g}{less})"
    if skill["verdict"].startswith("cannot tell") and (needed := skill.get("rows_needed")):
        read = f" --set test_limit={needed}" if evidence.test_limit and needed > evidence.test_limit else ""
        yield f"{title}: test on more rows, about {needed:,}, with --test FILE{read}."
        if again:
            yield f"If its answers are not good enough yet, train longer or at a higher rate: {again}, with another --out."
    elif skill["metric"]["before"] >= 100 and skill["state"] != "good":
        yield f"{title}: the model answered all of it before; there was nothing to learn."
    elif skill["state"] == "bad" and rate:
        yield f"{title}: train at a lower rate, --learning-rate {rate / 4:g} (it was {rate:g}), with another --out."
    elif skill["state"] != "good" and again:
        yield f"{title}: train longer or at a higher rate: {again}, with another --out."
    lost = [kept for kept in verdict["kept"] if kept["state"] == "bad"]
    if lost:
        names = ", ".join(str(kept.get("title") or kept["name"]) for kept in lost)
        out = Path(verdict["adapter"]).parent
        lower = f"a lower rate, --learning-rate {rate / 2:g} (it was {rate:g})" if rate else "a lower rate"
        half = f"anchorlora export {shlex.quote(out.as_posix())} --scale 0.5 --out DIR"
        yield f"{names}: train at {lower}, or with --budget 0.05: the change is scaled until the loss of kept text rises no more."
        yield f"Half of the change, without training again: {half}. It forgets less and has learned less."
        if any(kept["source"] == "self" for kept in lost):
            yield "What the model writes itself stands for little of what it can do: keep real old text too, with --keep FILE."
    counts = {rows["name"]: rows for rows in verdict.get("rows", ()) if rows["use"] in ("kept", "measured")}
    for kept in verdict["kept"]:
        if kept.get("rows_needed"):
            yield f"{kept.get('title') or kept['name']}: {_more_rows(kept, counts.get(kept['name'], {}))}"


def _more_rows(kept: Mapping[str, Any], counts: Mapping[str, Any]) -> str:
    """How to tell whether something was kept: by more rows of it, in all as many as are then held out, or by a larger margin."""
    if counts.get("use") == "measured":
        return "allow a larger drop, --margin POINTS; its held-out rows are those that an earlier run left."
    if kept["rows_needed"] > MOST_PROBES:
        return f"allow a larger drop, --margin POINTS; no more than {MOST_PROBES} of its rows are ever held out."
    share = counts["read"] / counts["held_out"] if counts.get("held_out") else None
    rows = "N" if share is None else f"{math.ceil(kept['rows_needed'] * share)}"
    more = f"--self-texts {rows}" if kept["source"] == "self" else f"{rows} rows in its file, of which a part is held out"
    return f"keep more of it ({more}), or allow a larger drop, --margin POINTS."


def loss_curve(losses: Sequence[tuple[int, float]]) -> dict[str, Any] | None:
    """Return the points of a curve in a box of 600 by 150, many steps as means, and the numbers beside it; None if too few."""
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    size = max(1, math.ceil(len(finite) / STEPS))
    groups = [finite[i : i + size] for i in range(0, len(finite), size)]
    points = [(mean(step for step, _ in group), mean(loss for _, loss in group)) for group in groups]
    if len(points) < 2:
        return None
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    first, last = points[0][0], points[-1][0]
    line = " ".join(
        f"{600 * (step - first) / (last - first):.1f},{145 - 140 * (loss - low) / ((high - low) or 1):.1f}" for step, loss in points
    )
    quarter = max(1, len(finite) // 4)
    ends = (finite[:quarter], finite[-quarter:])
    first_mean, last_mean = (mean(loss for _, loss in steps) for steps in ends)
    return {"line": line, "low": low, "high": high, "first": first_mean, "last": last_mean, "steps": finite[-1][0]}


def _rows(verdict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for the skill and each kept thing, with the unprotected twin's numbers; and one for what a chain kept longer."""
    twin = verdict["unprotected"]
    parts = [("new skill", verdict, verdict["skill"], twin and twin["skill"])]
    parts += [("to be kept", kept, kept, twin and twin["kept"][kept["name"]]) for kept in verdict["kept"]]
    parts += [("over the chain", kept, kept["over_chain"], None) for kept in verdict["kept"] if kept.get("over_chain")]
    return [{"name": part.get("title", part["name"]), "role": role, "now": now, "twin": of} for role, part, now, of in parts]
