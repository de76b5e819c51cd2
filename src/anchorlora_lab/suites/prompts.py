"""The user's own prompts, before and after: greedy answers compared with the right ones, without lm-evaluation-harness.

An answer is right if it equals the right one once both are normalized: case, punctuation and white space do not count
(`anchorlora.data.normalize`), except for signs that make another answer: C is not C++, and 15 is not 1.5. Of what the model says,
as many lines count as the right answer has, so a model that does not stop is judged by its answer and not by what follows.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anchorlora.continual.evaluate import Scorer
from anchorlora.data import Encoded, Encoder, Example, Sample, examples_of, normalize
from anchorlora.data.rendering import Turn
from anchorlora.data.rows import iterate_samples
from anchorlora.data.sample_files import rows_in
from anchorlora.data.text import shortened, turn_of
from anchorlora.data.thoughts import extract_answer
from anchorlora.errors import InvalidValue
from anchorlora.models.load import ends_of
from anchorlora.scores import Paired
from anchorlora_lab.suites.evaluation import PROMPTS, Flip, FlippedPrompts, Score, TaskScores
from anchorlora_lab.suites.questions import EvalProgress, Questions

METRIC = "exact_match"
ROOM = 16  # tokens beyond the longest right answer: enough that what goes on is seen to be another answer
DASHES = dict.fromkeys(range(0x2010, 0x2016), "-")
# what normalizing drops and another answer may differ by: operators, what stands between digits, a minus, # at a word, _ in a name
SIGNS = re.compile(
    r"!=|(?!^\+\d)[+<=>&@^~|/]|(?<=\d)[-.:*](?=\d)|(?<!\w)(?:-(?=\w)|\.(?=\d))|(?<=\w)[-#](?!\w)|#(?=\w)|(?<=[^\W_])_(?=[^\W_])"
)


@dataclass(frozen=True)
class OwnPrompts:
    """A file of the user's prompts and answers."""

    questions: Sequence[Example]
    name: str = PROMPTS

    @property
    def are_chats(self) -> bool:
        """True if a prompt is a chat, which only a chat template can render."""
        return any(q.messages and not q.sentence and q.ids is None for q in self.questions)

    @property
    def sha256(self) -> str:
        """Hash of the prompts and answers, wherever they lie."""
        content = [[q.messages or q.sentence, q.label, *q.tools] for q in self.questions]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def key(self, model: Any, tokenizer: Any, questions: Questions) -> dict[str, Any]:
        """Return everything about the prompts that a score depends on, for the cache."""
        encoded, most = self._encoded(model, tokenizer, questions)
        content = json.dumps([[e.prompt, e.example.label] for e in encoded])
        requests = hashlib.sha256(content.encode()).hexdigest()
        scored = f"{METRIC}, with signs"
        return {"task": self.name, "requests": requests, "max_new_tokens": most, "batch": questions.batch, "scored": scored}

    def score(self, model: Any, tokenizer: Any, questions: Questions, *, watch: EvalProgress) -> TaskScores:
        """Return the share of right answers of a model, and its answers."""
        encoded, most = self._encoded(model, tokenizer, questions)
        watch.begins(len(encoded))
        scorer = Scorer(model, tokenizer, max_new_tokens=most, batch=questions.batch, device=model.device)
        answers = scorer.texts([e.prompt for e in encoded], watch=lambda texts: watch.advance(len(texts)))
        texts = [extract_answer(text, e.example.lead, e.example.label) for text, e in zip(answers, encoded, strict=True)]
        right = [float(is_right(text, e.example.label)) for text, e in zip(texts, encoded, strict=True)]
        error = statistics.stdev(right) / len(right) ** 0.5 if len(right) > 1 else None
        return TaskScores(
            n=len(right),
            cut=sum(e.cut for e in encoded),
            num_fewshot=0,
            metrics={METRIC: Score(score=statistics.fmean(right), stderr=error)},
            values={self.name: {METRIC: list(right)}},
            texts=texts,
        )

    def flipped(self, base: TaskScores, after: TaskScores) -> FlippedPrompts:
        """Return the prompts whose answers changed between right and wrong."""
        values = ([v for v in side.values[self.name][METRIC] if v is not None] for side in (base, after))
        flips = Paired(*values).flips
        assert flips is not None

        def prompt_of(i: int) -> Flip:
            question = self.questions[i]
            answers = {"base": base.texts[i], "after": after.texts[i]}
            return Flip(place=question.place, prompt=_text(question), answer=question.label, **answers)

        return FlippedPrompts(right_to_wrong=[*map(prompt_of, flips.lost)], wrong_to_right=[*map(prompt_of, flips.gained)])

    def _encoded(self, model: Any, tokenizer: Any, questions: Questions) -> tuple[list[Encoded], int]:
        """The prompts as tokens, those that are too long cut after their head, and the longest answer."""
        encoder = Encoder(tokenizer, max_tokens=1, ends=ends_of(model))  # so that turns have the head that a cut prompt keeps
        turns = [_turn(question, encoder, template=questions.apply_chat_template) for question in self.questions]
        most = max(len(turn.answer) for turn in turns) + ROOM
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        room = max(context - most, 1) if context else None
        encoded = []
        for i, (question, turn) in enumerate(zip(self.questions, turns, strict=True)):
            cut = room is not None and len(turn.prompt) > room
            example = Example(i, "", turn.label or question.label, lead=turn.lead)
            encoded.append(Encoded(example, "", shortened(turn, room) if cut and room else turn.prompt, (), cut))
        return encoded, most


def read_prompts(path: Path) -> OwnPrompts:
    """Return the prompts of a file or folder with their right answers, all of them checked."""
    return OwnPrompts([question_of(sample) for sample in iterate_samples(rows_in(str(path)), source=str(path), mixed=True)])


def is_right(text: str, answer: str) -> bool:
    """Return True if a generated text gives the right answer."""
    lines = len(answer.strip().splitlines())
    lines_read = "\n".join(text.strip().splitlines()[:lines])
    if not normalize(answer):  # punctuation alone
        return lines_read.strip() == answer.strip()
    signs, right_signs = (SIGNS.findall(part.strip().translate(DASHES)) for part in (lines_read, answer))
    return normalize(lines_read) == normalize(answer) and signs == right_signs


def _turn(question: Example, encoder: Encoder, *, template: bool) -> Turn:
    """A question as training on it would read it; the prompt of plain text ends where the question ends."""
    if question.messages or question.ids is not None:
        return turn_of(question, encoder)
    if template:
        return turn_of(replace(question, sentence="", messages=({"role": "user", "content": question.sentence},)), encoder)
    answer = encoder.tokenizer(question.label, add_special_tokens=False, verbose=False).input_ids
    return Turn(question.sentence, encoder.prompt(question.sentence), tuple(answer), len(encoder.beginning))


def _text(question: Example) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in question.messages) or question.sentence


def question_of(sample: Sample) -> Example:
    """Return the prompt of a row with its right answer: the last message of a chat, or the text after a prompt."""

    def refusal(reason: str) -> InvalidValue:
        return InvalidValue(f"{sample.place}: {reason}")

    content = sample.content
    if not sample.weight:
        raise refusal("the row is not learned (weight or train), so its answer is not right; take it out")
    if isinstance(content, tuple):
        last, answers = content[-1], len(content) - 1
        if last["role"] != "assistant":
            raise refusal(f"the last message must be the assistant's, the right answer; it is from {last['role']!r:.40}")
        if sample.ids is None and answers not in sample.learned:
            raise refusal("the last message is not learned (weight or train), so it is not the right answer; take the row out")
        if last.get("tool_calls"):
            raise refusal("the last message calls tools, and answers are compared as text; take the row out")
    example = next(reversed([*examples_of([sample])]), None)
    asked = example is not None and (example.sentence or example.ids or any(message["content"] for message in example.messages))
    if example is None or not asked or not example.label.strip():
        empty = "prompt" if not asked else "answer"
        raise refusal(f"the {empty} is empty; give a prompt with its answer, or take the row out")
    if isinstance(content, tuple):
        return replace(example, index=0, messages=content[:-1], label=example.label[example.continued :])
    return replace(example, index=0)
