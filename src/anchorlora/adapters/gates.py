"""Gates of stacked blocks: one trainable scalar a block for the whole network   (SD-LoRA, Wu et al. 2025).

    dW_l = s sum_j m_j B_j A_j       m_j = a_j / c_j      a_j  gate      c_j  size of block j: rms over layers of |B_j| |A_j|

A finished block counts as a direction of size 1 times its gate: at its end a <- a c, so that m, and with it the function, stays.
The block that trains has size 1 (with B = 0 it has no direction yet). Factors stay as they were trained; only m acts on them, on
the r activations between A and B, so no factor is rescaled and history stays bitwise what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anchorlora.devices import in_float64
from anchorlora.geometry import Factors, Product


class Gates:
    """The gates of one stack of blocks, oldest first; the last one belongs to the block that trains, if one is open."""

    def __init__(self, values: Tensor, sizes: Tensor) -> None:
        self.values, self.sizes = nn.Parameter(values), sizes

    @classmethod
    def none(cls, device: torch.device) -> Gates:
        return cls(torch.zeros(0, device=device), torch.zeros(0, device=device))

    def __len__(self) -> int:
        return len(self.sizes)

    def open(self, value: float) -> None:
        """A gate for a new block."""
        with torch.no_grad():
            self.values = nn.Parameter(torch.cat([self.values, self.values.new_tensor([value])]))
            self.sizes = torch.cat([self.sizes, self.sizes.new_ones(1)])

    def close(self, block: Mapping[str, Factors]) -> None:
        """The block of the last gate is finished: give it its size, and the gate what keeps the function."""
        squares = [(float(in_float64(f.A).norm()) * float(in_float64(f.B).norm())) ** 2 for f in block.values()]
        size = (sum(squares) / len(squares)) ** 0.5
        if size > 0:  # a block that never moved has no direction to normalize
            with torch.no_grad():
                self.values[-1] *= size
                self.sizes[-1] = size

    def multipliers(self) -> Tensor:
        """m (t,), with the gates' gradient."""
        return self.values / self.sizes


@dataclass(frozen=True, eq=False)
class Gated:
    """The gates as a site sees them: live, and the multipliers (t,) of the task's start."""

    gates: Gates
    start: Tensor

    def block(self, current: Factors, anchor: Factors) -> Product:
        """The change of the current block, s (m B A - m_0 B_0 A_0)."""
        now, then = (float(m[-1]) for m in (in_float64(self.gates.multipliers().detach()), in_float64(self.start)))
        return Factors(current.A, now * current.B, current.scale).since(Factors(anchor.A, then * anchor.B, anchor.scale))

    def change(self, current: Factors, anchor: Factors, frozen: Factors | None) -> Product:
        """The change of the whole stack: the current block's, and that of earlier blocks, whose gates moved."""
        own = self.block(current, anchor)
        if frozen is None:
            return own
        moved = (in_float64(self.gates.multipliers().detach()) - in_float64(self.start))[:-1]
        left = frozen.scale * in_float64(frozen.B.detach()) * moved.repeat_interleave(current.rank)
        return Product(torch.cat([own.left, left], dim=1), torch.cat([own.right, in_float64(frozen.A.detach())], dim=0))
