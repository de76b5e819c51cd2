"""Old abilities: prompts of our own whose answers a rule checks, short facts, and choices by likelihood.

instructions  a topic and a demand on the form of the answer; right: IFEval's own checker says so (lm_eval)
facts         questions with one short answer; right: the answer holds it
choice        other such questions with four answers; right: the likeliest one, per token, is the right one
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of the kinds of instructions that IFEval has, those that SmolLM2-135M-Instruct meets more often than not; it never writes in one
# case, in quotation marks, or a list of three points.
ABILITIES: dict[str, Any] = json.loads((Path(__file__).parent / "abilities.json").read_text(encoding="utf-8"))
TOPICS: list[str] = ABILITIES["topics"]
DEMANDS: list[dict[str, Any]] = ABILITIES["demands"]
FACTS: list[tuple[str, str]] = [(question, answer) for question, answer in ABILITIES["facts"]]


@dataclass(frozen=True)
class Demand:
    """A prompt and the checker of what it demands."""

    prompt: str
    kind: str
    settings: dict[str, Any]

    def met(self, text: str) -> float:
        """Return 1 if IFEval's checker finds that a text meets the demand."""
        from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

        checker = INSTRUCTION_DICT[self.kind](self.kind)
        checker.build_description(**self.settings)
        return float(bool(text.strip()) and bool(checker.check_following(text)))


def instructions(count: int) -> list[Demand]:
    """Return prompts in a fixed order, each demand as often as any other."""
    made = [
        Demand(demand["prompt"].format(topic=TOPICS[(3 * i + 7 * round_) % len(TOPICS)]), demand["checker"], demand["settings"])
        for round_ in range(-(-count // len(DEMANDS)))
        for i, demand in enumerate(DEMANDS)
    ]
    return made[:count]


def facts(count: int) -> list[tuple[str, str]]:
    """Return questions and answers, in a fixed order that mixes the kinds."""
    return random.Random(1).sample(FACTS, min(count, len(FACTS)))


def fact_score(text: str, answer: str) -> float:
    """Return 1 if one of the answers is in a text as a word."""
    return float(bool(re.search(rf"\b(?:{answer})\b", text, re.I)))


def choices(count: int, ways: int = 4) -> list[tuple[str, tuple[str, ...], int]]:
    """Return the questions that `facts` leaves, four answers to each, and which is right."""
    shuffled = random.Random(1).sample(FACTS, len(FACTS))[-count:]
    answers = sorted({answer.split("|")[0] for _, answer in FACTS})
    draw = random.Random(2)
    made = []
    for question, answer in shuffled:
        right = answer.split("|")[0]
        options = [right, *draw.sample([other for other in answers if other not in answer.split("|")], ways - 1)]
        draw.shuffle(options)
        made.append((question, tuple(options), options.index(right)))
    return made


def passages(data: Path, count: int) -> list[str]:
    """Return passages that people wrote: the first words of reviews."""
    rows = json.loads((data / "standard_cl/SC/amazon/test.json").read_text(encoding="utf-8"))
    texts = [" ".join(row["sentence"].replace("Title:", "").replace("Text:", "").split()[:40]) for row in rows]
    return [text for text in texts if len(text.split()) == 40][:count]


def human_chats(data: Path, count: int) -> list[tuple[str, str]]:
    """Return questions that people asked, and the first words of what people answered."""
    rows = json.loads((data / "standard_cl/TC/yahoo/train.json").read_text(encoding="utf-8"))
    found = []
    for row in rows:
        parts = re.match(r"(?:Title: (.*?)\n)?Question: (.*?)\nAnswer: (.*)", row["sentence"], re.S)
        if parts:
            question, answer = " ".join((parts.group(1) or parts.group(2)).split()), parts.group(3).split()
            if 4 <= len(question.split()) <= 20 and len(answer) >= 8:
                found.append((question, " ".join(answer[:30])))
        if len(found) == count:
            break
    return found
