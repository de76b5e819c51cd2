"""What a row asks and what it answers: the examples that training learns, and the question that `eval` asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from anchorlora.data.samples import Example, Sample
from anchorlora.errors import InvalidValue


def examples_of(samples: Iterable[Sample]) -> Iterator[Example]:
    """Yield the examples of rows, the turns of a chat one after the other."""
    index = 0
    for sample in samples:
        for example in _examples(sample):
            yield replace(example, index=index)
            index += 1


def _examples(sample: Sample) -> Iterator[Example]:
    content, place = sample.content, sample.place
    if sample.ids is not None:
        if sample.weight:
            yield Example(0, "", content if isinstance(content, str) else content[-1]["content"], place=place, ids=sample.ids)
        return
    if isinstance(content, str):
        for prompt, answer in sample.turns():
            yield Example(0, str(prompt), answer, place=place)
        return
    plain = "" if sample.plain is None or isinstance(sample.plain.content, tuple) else sample.plain.content[: sample.plain.given]
    learned = sample.learned
    for i in learned:
        if i:
            yield Example(
                0,
                plain,
                content[i]["content"],
                content[:i],
                place,
                reply=content[i],
                tools=sample.tools,
                learned=tuple(earlier for earlier in learned if earlier < i),
                continued=sample.continued if i == sample.given else 0,
            )


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
