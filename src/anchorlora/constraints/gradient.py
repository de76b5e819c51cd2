"""Gradient projection: grad A <- grad A P   (paper, eq. 10 and 17).

    A  (r, d_in)  routing factor      V  (d_in, k)  orthonormal core      P = I - V V^T, never formed

Keeps dA V = 0 under plain SGD only: any optimizer that scales coordinates apart bends the step out of the complement again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of
from anchorlora.devices import in_float64

if TYPE_CHECKING:
    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class ProjectGradient(ProtectsPast):
    """Project the gradient of a routing factor onto the complement of the core."""

    factor: str = "A"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        return _Projecting(anchor, self.factor)


class _Projecting(ActiveConstraint):
    def __init__(self, anchor, factor):
        self.factor, self.targets = factor, [(layer, core_of(layer)) for layer in anchor.layers]

    def before_optimizer_step(self) -> None:
        for layer, core in self.targets:
            gradient = layer.gradient_rows(self.factor)
            if gradient is not None:
                gradient.copy_(core.outside(in_float64(gradient)))
