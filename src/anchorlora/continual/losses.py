"""Losses of a task's examples, for constraints that ask what answers depend on: one by one, or several in a row.

Also the memory that a method would leave of text that a model can do, as if it had been a task: no labels and no training are
needed. `AnswerSensitivity` reads an example's tokens and lets the model draw the answers, so any text will do: a completion, what
the assistant says, or every token but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anchorlora.adapters import NOTHING, Anchor
from anchorlora.constraints import AnswerSensitivity
from anchorlora.continual.batches import example_losses, micro_batch, packed_row, rows_of
from anchorlora.continual.data import longest_first
from anchorlora.data import Encoded, Encoder, Sample, TextTask, examples_of
from anchorlora.data.text import answer_fits
from anchorlora.errors import InvalidValue
from anchorlora.methods import Method
from anchorlora.models.load import ends_of
from anchorlora.models.packing import packed, unpackable

TOGETHER = 512  # tokens: the rows of every layer are held at once


@dataclass(frozen=True)
class ExampleLosses:
    """The losses of examples, without dropout: one after the other, or several at a time."""

    model: nn.Module
    chosen: Callable[[int], Sequence[Encoded]]  # so many of the examples
    device: torch.device
    packed: bool = False  # whether the model reads packed rows
    pad: int = 0
    watch: Callable[[int], None] = lambda done: None  # is told how many losses were taken

    def __call__(self, count: int) -> Iterator[Tensor]:
        """Return the loss of one example after the other."""
        return (losses[0] for losses in self._losses(count, alone=True))

    def together(self, count: int) -> Iterator[Tensor]:
        """Return the losses of several examples at a time, whose tokens are all in one row, none shared and none padding."""
        return self._losses(count)

    def summed(self, count: int) -> Iterator[Tensor]:
        """Return the sum of the losses of several examples at a time, in one row that reads a common beginning once."""
        return (losses.sum() for losses in self._losses(count, share=True))

    def _losses(self, count: int, *, alone: bool = False, share: bool = False) -> Iterator[Tensor]:
        model, examples, done = self.model.eval(), self.chosen(count), 0
        in_rows = self.packed and not alone
        for group in rows_of(examples, TOGETHER, share=share) if in_rows else ([example] for example in examples):
            batch = (packed_row(group, share=share) if in_rows else micro_batch(group, pad=self.pad)).to(self.device)
            with packed(model, batch.layout):
                yield example_losses(model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False).logits, batch)
            done += len(group)
            self.watch(done)


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
    if (reader := next((c for c in method.constraints if isinstance(c, AnswerSensitivity)), None)) is None:
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
