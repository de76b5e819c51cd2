"""What a row asks and what it answers: the examples that training learns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from anchorlora.data.samples import Example, Sample


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
