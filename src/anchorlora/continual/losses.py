"""Losses of a task's examples, for constraints that ask what answers depend on: one by one, or several in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anchorlora.continual.batches import MicroBatch, example_losses, micro_batch, packed_row, rows_of
from anchorlora.data import Encoded
from anchorlora.models.packing import packed

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
        """Yield the loss of one example after the other."""
        self.model.eval()
        for done, example in enumerate(self.chosen(count), 1):
            yield _losses_of(self.model, micro_batch([example], pad=self.pad), self.device)[0]
            self.watch(done)

    def together(self, count: int) -> Iterator[Tensor]:
        """Yield the losses of several examples at a time, whose tokens are all in one row, none shared and none padding."""
        if not self.packed:
            yield from (loss[None] for loss in self(count))
            return
        model, done = self.model.eval(), 0
        for group in rows_of(self.chosen(count), TOGETHER, share=False):
            batch = packed_row(group, share=False)
            assert batch.layout is not None
            with packed(model, batch.layout):
                yield _losses_of(model, batch, self.device)
            done += len(group)
            self.watch(done)


def _losses_of(model: nn.Module, batch: MicroBatch, device: torch.device) -> Tensor:
    batch = batch.to(device)
    return example_losses(model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False).logits, batch)
