"""The O-LoRA penalty: lambda sum_l |A_<t A_t^T|_1, entrywise, on routing factors   (paper, eq. 14; official O-LoRA code).

    A_<t  (r (t-1), d_in)  stacked rows of earlier blocks      A_t  (r, d_in)  current rows

Gradient on A_t: lambda sign(A_t A_<t^T) A_<t. No mean over layers, ranks or tasks, and the scale s does not enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held, Penalty, ProtectsPast

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Scope


@dataclass(frozen=True)
class RoutingOverlap(ProtectsPast):
    """Pull the current routing rows towards orthogonality to earlier ones, with weight `strength` (lambda)."""

    strength: float = 0.5
    reads = ()

    def hold(self, scope: Scope) -> Held:
        for site in scope.sites:
            if site.frozen is None:
                raise ValueError(
                    f"RoutingOverlap needs the frozen rows of earlier blocks, and {site.layer} has none; "
                    "pass history= to Scope.of, or use a method with a block per task"
                )
        return _Overlapping("overlap", self.strength, scope)


class _Overlapping(Penalty):
    def pieces(self, site) -> tuple[Tensor, dict[str, Tensor]]:
        A, past = site.factor("A"), site.frozen.A
        overlap = A @ past.T
        return overlap.abs().sum(), {"A": overlap.sign() @ past}
