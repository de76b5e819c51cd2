"""Prompts of one's own with their right answers: rows in any form that is learned, each in a form of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anchorlora.data import Example, Sample, examples_of
from anchorlora.data.rows import iterated
from anchorlora.data.sample_files import rows_in
from anchorlora.errors import InvalidValue


def read_answered(path: Path | str) -> list[Example]:
    """Return the prompts of a file or folder with their right answers, all of them checked."""
    return [question_of(sample) for sample in iterated(rows_in(str(path)), source=str(path), mixed=True)]


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
