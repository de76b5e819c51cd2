"""Gradient projection: grad A <- grad A P   (paper, eq. 10 and 17).

    A  (r, d_in)  routing factor      V  (d_in, k)  orthonormal core      P = I - V V^T, never formed

Keeps dA V = 0 under plain SGD only: any optimizer that scales coordinates apart bends the step out of the complement again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held, ProtectsPast
from anchorlora.constraints.checks import core_of
from anchorlora.devices import in_float64

if TYPE_CHECKING:
    from anchorlora.adapters import Scope


@dataclass(frozen=True)
class ProjectGradient(ProtectsPast):
    """Project the gradient of a routing factor onto the complement of the core."""

    factor: str = "A"

    def hold(self, scope: Scope) -> Held:
        return _Projecting(scope, self.factor)


class _Projecting(Held):
    def __init__(self, scope, factor):
        self.factor, self.targets = factor, [(site, core_of(site)) for site in scope.sites]

    def before_step(self) -> None:
        for site, core in self.targets:
            gradient = site.gradient_rows(self.factor)
            if gradient is not None:
                gradient.copy_(core.outside(in_float64(gradient)))
