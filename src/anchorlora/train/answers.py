"""Answers before and after a skill, of some held-out examples, from what its directory holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.data import Example, TextFiles
from anchorlora.store.predictions import read_predictions
from anchorlora.store.run_folder import SKILL, RunFolder
from anchorlora.train.stages import probes_in, scores_in

OF_SKILL = 5  # examples that are shown, and of each kept thing one


@dataclass(frozen=True)
class Answer:
    """One held-out example: what was asked, what the model answered before and after, and the right answer."""

    prompt: str
    before: str
    after: str
    right: str
    scores: tuple[float, float]  # of the two answers by the primary metric, from 0 to 1


@dataclass(frozen=True)
class Answers:
    """Answers to the examples of the skill, or of something that is kept."""

    name: str
    shown: tuple[Answer, ...]  # of the skill the first examples; of what is kept the first one whose answer changed, if one did
    examples: int  # of which answers were generated
    changed: int  # of them, whose answer is another now


def answers_of(out: Path, verdict: Mapping[str, Any]) -> list[Answers]:
    """Return answers of a skill and of each kept thing of its verdict; plain text has none."""
    folder, name = out / SKILL, verdict["name"]
    then, now = scores_in(folder, "before"), scores_in(folder, "after")
    learned = [row.model_dump() for row in read_predictions(RunFolder(out).task(1, name).predictions)]
    parts = [_answers(name, verdict.get("title") or name, probes_in(folder / "after", name), then[name], learned, range(OF_SKILL))]
    for part in verdict["kept"]:
        kept, title = part["name"], part.get("title") or part["name"]
        shown = next((i for i, pair in enumerate(zip(then[kept], now[kept], strict=True)) if _differ(*pair)), 0)
        parts.append(_answers(kept, title, probes_in(folder / "before", kept), then[kept], now[kept], range(shown, shown + 1)))
    return [part for part in parts if part.shown]


def _answers(name: str, title: str, files: TextFiles, before: Sequence[Any], after: Sequence[Any], places: range) -> Answers:
    rows = list(zip(files.examples(name, "test", limit=places.stop), before, after, strict=False))[places.start :]
    shown = [_answer(example, was, now) for example, was, now in rows if example.messages or example.sentence]
    changed = sum(_differ(was, now) for was, now in zip(before, after, strict=True))
    return Answers(title, tuple(shown), len(before), changed)


def _differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return bool(before["text"].strip() != after["text"].strip())


def _answer(example: Example, before: Mapping[str, Any], after: Mapping[str, Any]) -> Answer:
    scores = tuple(next(iter(row["metrics"].values())) for row in (before, after))
    return Answer(_prompt(example), before["text"], after["text"], before["gold"], scores)


def _prompt(example: Example) -> str:
    """The prompt of an example: one message by its words alone, and several with their roles."""
    if not example.messages:
        return example.sentence
    if len(example.messages) == 1:
        return str(example.messages[0].get("content") or "")
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in example.messages)
