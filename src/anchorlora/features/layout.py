"""Where the examples of a packed row are.

one row      [ prefix | own tokens of example 1 | own tokens of example 2 | .. ]
example i    prefix + its own tokens; positions restart after the prefix
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """The examples of one packed row."""

    prefix: int  # tokens that all examples begin with, computed once
    lengths: tuple[int, ...]  # own tokens of each example, after the prefix
    _masks: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict, repr=False)
    _blocks: dict[torch.device, Any] = field(default_factory=dict, repr=False)

    def positions(self) -> Tensor:
        """Return the position of every token of the row, (tokens)."""
        own = [torch.arange(self.prefix, self.prefix + length) for length in self.lengths]
        return torch.cat([torch.arange(self.prefix), *own])

    @property
    def starts(self) -> list[int]:
        """The place in the row of each example's first own token."""
        return [self.prefix + start for start in accumulate(self.lengths[:-1], initial=0)]

    def ends(self) -> Tensor:
        """Return the place in the row of each example's last token, (examples,)."""
        return torch.tensor(self.lengths).cumsum(0) + self.prefix - 1

    def places(self) -> list[Tensor]:
        """Return the places in the row of each example's tokens, those of the prefix first."""
        bounds = zip(self.starts, self.lengths, strict=True)
        return [torch.cat([torch.arange(self.prefix), torch.arange(start, start + length)]) for start, length in bounds]

    def parts(self, row: Tensor, dim: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the prefix, and the own tokens of each example."""
        prefix, *own = row.split([self.prefix, *self.lengths], dim)
        return prefix, tuple(own)

    def examples(self, rows: Tensor) -> list[Tensor]:
        """Return the rows of each example: those of the prefix, then its own: `rows` (1, tokens, d)."""
        prefix, own = self.parts(rows[0], 0)
        return [torch.cat([prefix, continuation]) for continuation in own]

    def mask(self, length: int, like: Tensor) -> Tensor:
        """Return what is added to the attention scores of own tokens: they see the prefix, and own tokens up to themselves."""
        key = (length, like.dtype, like.device)
        if key not in self._masks:
            whole = torch.full((length, self.prefix + length), -torch.inf, dtype=like.dtype, device=like.device)
            self._masks[key] = whole.triu(diagonal=self.prefix + 1)
        return self._masks[key]

    def blocks(self, device: torch.device) -> Any:
        """Return the same for the whole row, as flex attention reads it: which blocks of tokens attend to which."""
        from torch.nn.attention.flex_attention import create_block_mask

        if device not in self._blocks:
            sizes = torch.tensor([self.prefix, *self.lengths])
            of = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)  # 0: the prefix

            def attends(batch: Tensor, head: Tensor, asking: Tensor, asked: Tensor) -> Tensor:
                return (asking >= asked) & ((of[asked] == 0) | (of[asked] == of[asking]))

            self._blocks[device] = create_block_mask(attends, None, None, len(of), len(of), device=str(device))
        return self._blocks[device]


_CURRENT: ContextVar[Layout | None] = ContextVar("layout", default=None)


def current() -> Layout | None:
    """Return the layout of the row that a model reads now; None while it reads padded rows."""
    return _CURRENT.get()


@contextmanager
def reading(layout: Layout) -> Iterator[None]:
    """Say that the forward passes of the block read packed rows of this layout."""
    token = _CURRENT.set(layout)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def pack(rows: Sequence[Sequence[int]], prefix: int | None = None) -> tuple[Layout, list[int]]:
    """Return the layout of rows that are read as one, and its tokens; by default, what all rows begin with is read once."""
    if prefix is None:
        prefix = common_prefix(rows) if len(rows) > 1 else 0
    layout = Layout(prefix, tuple(len(row) - prefix for row in rows))
    return layout, [*rows[0][:prefix], *(token for row in rows for token in row[prefix:])]


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all rows begin with, leaving each row one token of its own."""
    shortest = min(len(row) for row in rows) - 1
    first = rows[0]
    return next((i for i in range(shortest) if any(row[i] != first[i] for row in rows)), max(shortest, 0))
