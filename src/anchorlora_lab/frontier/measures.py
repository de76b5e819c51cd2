"""Measures of a point of the frontier: the new skill, old abilities, losses and divergences from the model before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anchorlora.data import Encoded, Example
from anchorlora.devices import in_float64
from anchorlora_lab.frontier.skills import Skill, choices, fact_score, facts, instructions, passages
from anchorlora_lab.frontier.subject import Subject

DIGITS = 5
ANSWER = 40  # tokens of an answer to an instruction, at most


@dataclass(frozen=True)
class Sizes:
    """How many examples there are of everything."""

    train: int = 192
    test: int = 40
    instructions: int = 30
    facts: int = 30
    choices: int = 30
    chats: int = 12
    passages: int = 12
    own: int = 48  # chats for cores, and as many others for the mix


@dataclass(eq=False)
class Measures:
    """Everything that a model is measured by, beside the new skill; what the model said before is read once."""

    subject: Subject
    data: Path
    sizes: Sizes
    before: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.demands, self.facts = instructions(self.sizes.instructions), facts(self.sizes.facts)
        self.choices = choices(self.sizes.choices)
        subject = self.subject
        self.chats, _ = subject.own_encoded("held-out", self.sizes.chats)
        begin = (int(subject.tokenizer.bos_token_id or subject.tokenizer.eos_token_id),)
        texts = passages(self.data, self.sizes.passages)
        self.passages = [Encoded(Example(i, "", ""), "", begin, subject.ids(text), False) for i, text in enumerate(texts)]
        self.endings = [
            Encoded(Example(i, "", ""), "", subject.prompt(question), subject.ids(answer), False)
            for i, (question, answers, _) in enumerate(self.choices)
            for answer in answers
        ]

    def chance(self) -> dict[str, float]:
        """Return what answers have by chance, in percent: those to the other prompts, for instructions; guesses, for choice."""
        texts = self.subject.answers([demand.prompt for demand in self.demands], max_new_tokens=ANSWER)
        others = [demand.met(text) for i, demand in enumerate(self.demands) for j, text in enumerate(texts) if i != j]
        guessed = [1 / len(answers) for _, answers, _ in self.choices]
        return {"instructions": round(100 * fmean(others), 1), "choice": round(100 * fmean(guessed), 1)}

    def of(self, skill: Skill) -> dict[str, Any]:
        """Measure the model as it is."""
        subject = self.subject
        texts = subject.answers([demand.prompt for demand in self.demands], max_new_tokens=ANSWER)
        old = {"instructions": [demand.met(text) for demand, text in zip(self.demands, texts, strict=True)]}
        texts = subject.answers([question for question, _ in self.facts], max_new_tokens=12)
        old["facts"] = [fact_score(text, answer) for text, (_, answer) in zip(texts, self.facts, strict=True)]
        losses = [loss for loss, _ in self._read("choice", self.endings, compare=False)]
        old["choice"] = []
        for _, answers, right in self.choices:
            own, losses = losses[: len(answers)], losses[len(answers) :]
            old["choice"].append(float(own.index(min(own)) == right))
        texts = subject.answers([e.prompt for e in skill.test], max_new_tokens=skill.max_new_tokens)
        new = [skill.score(text, e.answer) for text, e in zip(texts, skill.test, strict=True)]
        gold = [subject.encoded(i, e.prompt, e.answer) for i, e in enumerate(skill.test[: self.sizes.chats])]
        loss, kl = {}, {}
        for name, examples in (("chats", self.chats), ("passages", self.passages), (f"new {skill.name}", gold)):
            read = self._read(name, examples, compare=True)
            short = name.split()[0]
            loss[short], kl[short] = [round(a, DIGITS) for a, _ in read], [round(b, DIGITS) for _, b in read]
        return {"new": [round(score, DIGITS) for score in new], "old": old, "loss": loss, "kl": kl}

    def _read(self, name: str, examples: Sequence[Encoded], *, compare: bool) -> list[tuple[float, float]]:
        """The mean loss over each example's answer, and its divergence from the model before."""
        if compare and name not in self.before:
            with self.subject.scaled(0.0):
                self.before[name] = [log_p.half() for _, log_p in self.subject.log_probs(examples)]
        rows_read: list[tuple[float, float]] = []
        for i, (batch, log_p) in enumerate(self.subject.log_probs(examples)):
            answered = batch.targets != -100
            counts = answered.sum(1).tolist()
            losses = -log_p.gather(1, batch.targets[answered][:, None])[:, 0]
            divergence = torch.zeros_like(losses)
            if compare:
                then = self.before[name][i].float().log_softmax(-1)
                divergence = (then.exp() * (then - log_p)).sum(-1)
            rows = zip(losses.split(counts), divergence.split(counts), strict=True)
            rows_read += [(float(in_float64(a).mean()), float(in_float64(b).mean())) for a, b in rows]
        return rows_read
