"""The O-LoRA penalty: lambda sum_l |A_<t A_t^T|_1, entrywise, on routing factors   (paper, eq. 14; official O-LoRA code).

    A_<t  (r (t-1), d_in)  stacked rows of earlier blocks      A_t  (r, d_in)  current rows

Gradient on A_t: lambda sign(A_t A_<t^T) A_<t. No mean over layers, ranks or tasks, and the scale s does not enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, Penalty, ProtectsPast
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class RoutingOverlap(ProtectsPast):
    """Pull the current routing rows towards orthogonality to earlier ones, with weight `strength` (lambda)."""

    strength: float = 0.5
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        for layer in anchor.layers:
            if layer.history is None:
                raise InvalidValue(
                    f"RoutingOverlap needs the frozen rows of earlier blocks, and {layer.name} has none; "
                    "pass history= to Anchor.of, or use a method with a block per task"
                )
        return _Overlapping("overlap", self.strength, anchor)


class _Overlapping(Penalty):
    def pieces(self, layer) -> tuple[Tensor, dict[str, Tensor]]:
        A, past = layer.factor("A"), layer.history.A
        overlap = A @ past.T
        return overlap.abs().sum(), {"A": overlap.sign() @ past}
