"""Weight residual projection, anchored: A <- A_0 + (A_raw - A_0) P   (paper, eq. 10, summed over the steps of a task).

    A_0  (r, d_in)  anchor      A_raw  what the optimizer made      V  (d_in, k)  core      P = I - V V^T, never formed

`ProjectStep` is the paper's own step-by-step form, A <- A_pre + (A_raw - A_pre) P. Both are equal in exact arithmetic. Step by
step, each write rounds once more and the roundings gather like a random walk; from the anchor there is one rounding in all,
and an infeasibility from any other source is repaired. Arithmetic in float64, storage in the parameter's own precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor

if TYPE_CHECKING:
    from anchorlora.adapters import Scope


@dataclass(frozen=True)
class ProjectDisplacement(ProtectsPast):
    """Keep (A - A_0) V = 0 whatever the optimizer did."""

    factor: str = "A"

    def hold(self, scope: Scope) -> Held:
        return _FromAnchor([(exact_factor(site, self.factor), site.start(self.factor), core_of(site)) for site in scope.sites])


class _FromAnchor(Held):
    def __init__(self, targets):
        self.targets = targets

    def after_step(self) -> None:
        for parameter, start, core in self.targets:
            anchor = start.double()  # read at each step: a `Retract` listed later may have moved it
            parameter.copy_(anchor + core.outside(parameter.double() - anchor))


@dataclass(frozen=True)
class ProjectStep(ProtectsPast):
    """Keep (A_q+1 - A_q) V = 0 at every single step: the paper's form, kept to compare."""

    factor: str = "A"

    def hold(self, scope: Scope) -> Held:
        return _FromStep([(exact_factor(site, self.factor), core_of(site)) for site in scope.sites])


class _FromStep(Held):
    def __init__(self, targets):
        self.targets = targets
        self.before = [parameter.detach().double().clone() for parameter, _ in targets]  # double() alone copies no float64

    def before_step(self) -> None:
        for kept, (parameter, _) in zip(self.before, self.targets, strict=True):
            kept.copy_(parameter)

    def after_step(self) -> None:
        for kept, (parameter, core) in zip(self.before, self.targets, strict=True):
            parameter.copy_(kept + core.outside(parameter.double() - kept))
