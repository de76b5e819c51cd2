"""Answers before and after a skill, of some held-out examples, from what its directory holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.data import Example
from anchorlora.store.run_folder import SKILL
from anchorlora.train.stages import probes_in, scores_after, scores_in

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
    folder = out / SKILL
    then, now = scores_in(folder, "before"), scores_after(out, verdict["name"])
    answers = []
    for part, stage in ((verdict, "after"), *((kept, "before") for kept in verdict["kept"])):
        name = part["name"]
        pairs = list(zip(then[name], now[name], strict=True))
        changed = [i for i, (before, after) in enumerate(pairs) if before["text"].strip() != after["text"].strip()]
        first = next(iter(changed), 0)
        start, stop = (0, OF_SKILL) if part is verdict else (first, first + 1)
        examples = list(probes_in(folder / stage, name).examples(name, "test", limit=stop))
        rows = list(zip(examples, pairs, strict=False))[start:]
        shown = [_answer(example, *pair) for example, pair in rows if example.is_answer]
        if shown:
            answers.append(Answers(part.get("title") or name, tuple(shown), len(pairs), len(changed)))
    return answers


def _answer(example: Example, before: Mapping[str, Any], after: Mapping[str, Any]) -> Answer:
    scores = tuple(next(iter(row["metrics"].values())) for row in (before, after))
    return Answer(_prompt(example), before["text"], after["text"], before["gold"], scores)


def _prompt(example: Example) -> str:
    """The prompt of an example: one message by its words alone, and several with their roles."""
    if not example.messages:
        return example.sentence or "(the chat begins)"
    if len(example.messages) == 1:
        return str(example.messages[0].get("content") or "")
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in example.messages)
