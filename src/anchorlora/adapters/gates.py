"""Gates of stacked adapters: one trainable scalar per task for the whole network   (SD-LoRA, Wu et al. 2025).

    dW_l = s sum_j m_j B_j A_j       m_j = a_j / c_j      a_j  gate      c_j  size of adapter j: rms over layers of |B_j| |A_j|

A finished adapter counts as a direction of size 1 times its gate: when its task ends, a <- a c, so m and the function stay. The
adapter that trains has size 1 (with B = 0 it has no direction yet). Factors stay as they were trained: m acts only on the r
activations between A and B, so no factor is rescaled and the history stays bitwise the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anchorlora.devices import in_float64
from anchorlora.geometry import Factors, Product


class Gates:
    """Gates of a stack of adapters, oldest first; the last one belongs to the adapter that trains, if one is open.

    Args:
        values: Gates a (t,), which train.
        sizes: Sizes c (t,) of the adapters.

    Example:
        >>> from anchorlora.adapters import Gates
        >>> gates = Gates.none(torch.device("cpu"))
        >>> gates.open(0.5)
        >>> len(gates), gates.multipliers().tolist()
        (1, [0.5])
    """

    def __init__(self, values: Tensor, sizes: Tensor) -> None:
        self.values, self.sizes = nn.Parameter(values), sizes

    @classmethod
    def none(cls, device: torch.device) -> Gates:
        """Return the gates of an empty stack.

        Args:
            device: Device of the gates.
        """
        return cls(torch.zeros(0, device=device), torch.zeros(0, device=device))

    def __len__(self) -> int:
        return len(self.sizes)

    def open(self, value: float) -> None:
        """Add a gate for a new adapter.

        Args:
            value: Initial gate.
        """
        with torch.no_grad():
            self.values = nn.Parameter(torch.cat([self.values, self.values.new_tensor([value])]))
            self.sizes = torch.cat([self.sizes, self.sizes.new_ones(1)])

    def close(self, block: Mapping[str, Factors]) -> None:
        """Finish the last gate's adapter: give it its size, and the gate the value that keeps the function.

        Args:
            block: Layer path -> factors of the finished adapter.
        """
        squares = [(float(in_float64(f.A).norm()) * float(in_float64(f.B).norm())) ** 2 for f in block.values()]
        size = (sum(squares) / len(squares)) ** 0.5
        if size > 0:  # an adapter that never moved has no direction to normalize
            with torch.no_grad():
                self.values[-1] *= size
                self.sizes[-1] = size

    def multipliers(self) -> Tensor:
        """Return m = a / c (t,), with gradients to the gates."""
        return self.values / self.sizes


@dataclass(frozen=True, eq=False)
class Gated:
    """Gates as an adapted layer sees them.

    Attributes:
        gates: Live gates of the stack.
        start: Multipliers m (t,) at the start of the task.
    """

    gates: Gates
    start: Tensor

    def block(self, current: Factors, anchor: Factors) -> Product:
        """Return the change of the current adapter, s (m B A - m_0 B_0 A_0).

        Args:
            current: Live factors.
            anchor: Factors at the start of the task.
        """
        now, then = (float(m[-1]) for m in (in_float64(self.gates.multipliers().detach()), in_float64(self.start)))
        return Factors(current.A, now * current.B, current.scale).since(Factors(anchor.A, then * anchor.B, anchor.scale))

    def change(self, current: Factors, anchor: Factors, frozen: Factors | None) -> Product:
        """Return the change of the whole stack: of the current adapter, and of earlier ones whose gates have moved.

        Args:
            current: Live factors of the current adapter.
            anchor: Its factors at the start of the task.
            frozen: Stacked factors of the history, or None.
        """
        own = self.block(current, anchor)
        if frozen is None:
            return own
        moved = (in_float64(self.gates.multipliers().detach()) - in_float64(self.start))[:-1]
        left = frozen.scale * in_float64(frozen.B.detach()) * moved.repeat_interleave(current.rank)
        return Product(torch.cat([own.left, left], dim=1), torch.cat([own.right, in_float64(frozen.A.detach())], dim=0))
