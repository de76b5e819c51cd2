"""Losses of a task's examples, for constraints that ask what answers depend on: one by one, or several in a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anchorlora.continual.batches import MicroBatch, example_losses, micro_batch, packed_row, rows_of
from anchorlora.continual.inputs import RunInputs
from anchorlora.data import Encoded
from anchorlora.models.packing import packed

TOGETHER = 512  # tokens: the rows of every layer are held at once, in float64


@dataclass(frozen=True)
class TaskLosses:
    """The losses of a task's examples, in training order, without dropout."""

    inputs: RunInputs  # what the run that trains the task reads
    name: str

    def __call__(self, count: int) -> Iterator[Tensor]:
        """Yield the loss of one example after the other."""
        pad = self.inputs.base_model.model.generation_config.pad_token_id
        yield from one_by_one(self.inputs.adapters.model, self._first(count), pad=pad, device=self.inputs.base_model.device)

    def together(self, count: int) -> Iterator[Tensor]:
        """Yield the losses of several examples at a time, whose tokens are all in one row, none shared and none padding."""
        if self.inputs.unpacked is not None:
            yield from (loss[None] for loss in self(count))
            return
        model = self.inputs.adapters.model.eval()
        for group in rows_of(self._first(count), TOGETHER, share=False):
            batch = packed_row(group, share=False)
            assert batch.layout is not None
            with packed(model, batch.layout):
                yield _losses_of(model, batch, self.inputs.base_model.device)

    def _first(self, count: int) -> list[Encoded]:
        data = self.inputs.data
        return [data.train[self.name][i] for i in data.shuffled(self.name, 1)[:count]]


def one_by_one(model: nn.Module, examples: Iterable[Encoded], *, pad: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the loss of one example after the other, without dropout."""
    model.eval()
    for example in examples:
        yield _losses_of(model, micro_batch([example], pad=pad), device)[0]


def _losses_of(model: nn.Module, batch: MicroBatch, device: torch.device) -> Tensor:
    batch = batch.to(device)
    return example_losses(model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False).logits, batch)
