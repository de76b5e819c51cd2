"""Micro-batches and windows: a window is the examples of one optimizer step, a micro-batch those of one forward.

Rows are padded on the left, so the answers end together and logits are computed for the last few positions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.tasks import Encoded

IGNORED = -100


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Examples of one forward.

    inputs   input_ids, attention_mask, position_ids, each (n, length)
    keep     positions at the end whose logits are needed
    targets  (n, keep - 1)  answer tokens as the logits there should predict them, -100 elsewhere
    """

    inputs: dict[str, Tensor]
    keep: int
    targets: Tensor

    def __len__(self) -> int:
        return self.targets.shape[0]

    @property
    def answer_tokens(self) -> int:
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch({k: v.to(device) for k, v in self.inputs.items()}, self.keep, self.targets.to(device))


@dataclass(frozen=True, eq=False)
class Window:
    """The micro-batches of one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.micro_batches)

    @property
    def answer_tokens(self) -> int:
        return sum(batch.answer_tokens for batch in self.micro_batches)


def padded(rows: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Model inputs (n, longest) with padding on the left, positions counted from the first real token."""
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = torch.tensor(row)
        mask[i, length - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def micro_batch(examples: Sequence[Encoded], *, pad: int) -> MicroBatch:
    longest = max(len(e.answer) for e in examples)
    targets = torch.full((len(examples), longest), IGNORED)
    for i, e in enumerate(examples):
        targets[i, longest - len(e.answer) :] = torch.tensor(e.answer)
    return MicroBatch(padded([e.prompt + e.answer for e in examples], pad), longest + 1, targets)


def nobody(start: int, end: int) -> Sequence[Encoded]:
    return ()


def windows(
    examples: Sequence[Encoded],
    order: Sequence[int],
    *,
    size: int,
    micro: int,
    pad: int,
    rehearsed: Callable[[int, int], Sequence[Encoded]] = nobody,
) -> Iterator[Window]:
    """Examples in the given order, `size` a window and `micro` a micro-batch; the last window may be smaller.

    rehearsed: the remembered examples that join the window of the new ones from `start` to `end`.
    """
    for start in range(0, len(order), size):
        end = min(start + size, len(order))
        chosen = [*(examples[i] for i in order[start:end]), *rehearsed(start, end)]
        yield Window(tuple(micro_batch(chosen[i : i + micro], pad=pad) for i in range(0, len(chosen), micro)))
