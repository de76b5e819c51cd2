"""The memory that a method would leave of text that a model can do, as if it had been a task: no labels and no training are needed.

`AnswerSensitivity` reads an example's tokens and lets the model draw the answers, so any text will do: a completion, what the
assistant says, or every token but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anchorlora.adapters import NOTHING, Anchor
from anchorlora.constraints import AnswerSensitivity
from anchorlora.continual.data import longest_first
from anchorlora.continual.losses import ExampleLosses
from anchorlora.data import Encoder, Sample, TextTask, examples_of
from anchorlora.data.text import answer_fits
from anchorlora.errors import InvalidValue
from anchorlora.methods import Method
from anchorlora.models.load import ends_of
from anchorlora.models.packing import unpackable


def memory_of_text(
    method: Method,
    adapted: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    *,
    name: str,
    device: torch.device,
    max_tokens: int,
    past: Mapping[str, Tensor] = NOTHING,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Tensor]:
    """Return what a method remembers of text, beside what it remembers already."""
    reader = next((c for c in method.constraints if isinstance(c, AnswerSensitivity)), None)
    if reader is None:
        raise InvalidValue(f"{method.name} remembers nothing that could be read from text: it has no AnswerSensitivity()")
    encoder = Encoder(tokenizer, max_tokens=max_tokens, ends=ends_of(adapted))
    answered = list(examples_of(samples))
    fitting = [example for example in answered if answer_fits(example, encoder)]
    examples = encoder.encode(TextTask(name), fitting or answered)
    if not len(examples):
        raise InvalidValue(f"{name} has no answer whose tokens could be read")

    total = min(len(examples), reader.examples)
    losses = ExampleLosses(
        adapted,
        lambda count: [examples[i] for i in spread(len(examples), count)],
        device,
        packed=unpackable(adapted, longest_first(examples), longest=max(examples.lengths)) is None,
        pad=adapted.generation_config.pad_token_id,
        watch=lambda done: watch(done, total),
    )
    return reader.end_task(Anchor.of(adapted, past=past, losses=losses))


def spread(total: int, count: int) -> list[int]:
    """Return indices of as many examples as are asked for and there are, evenly over all."""
    taken = min(total, count)
    return [i * total // taken for i in range(taken)]
