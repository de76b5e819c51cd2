"""Weight residual projection, anchored: A <- A_0 + (A_raw - A_0) P   (paper, eq. 12, summed over the steps of a task).

    A_0  (r, d_in)  anchor      A_raw  what the optimizer made      V  (d_in, k)  core      P = I - V V^T, never formed

`ProjectStep` is the paper's own step-by-step form, A <- A_pre + (A_raw - A_pre) P. Both are equal in exact arithmetic. Step by
step, each write rounds once more and the roundings gather like a random walk; from the anchor there is one rounding in all,
and an infeasibility from any other source is repaired. Arithmetic in float64, storage in the parameter's own precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor, off_core, on_core, raise_moved
from anchorlora.devices import in_float64

if TYPE_CHECKING:
    from anchorlora.adapters import Scope


@dataclass(frozen=True)
class ProjectDisplacement(ProtectsPast):
    """Keep (A - A_0) V = 0 whatever the optimizer did."""

    factor: str = "A"

    def hold(self, scope: Scope) -> Held:
        return _FromAnchor(scope, self.factor)


class _FromAnchor(Held):
    def __init__(self, scope, factor):
        for site in scope.sites:
            exact_factor(site, factor)
        self.factor, self.targets = factor, [(site, core_of(site)) for site in scope.sites]

    def project(self) -> None:
        for site, core in self.targets:
            rows, anchor = site.rows(self.factor), in_float64(site.start_rows(self.factor))  # a later `Retract` may move the anchor
            rows.copy_(anchor + core.outside(in_float64(rows) - anchor))

    def broken(self) -> str | None:
        for site, core in self.targets:
            rows, anchor = in_float64(site.rows(self.factor)), in_float64(site.start_rows(self.factor))
            found, bound = off_core(rows - anchor, core, size=rows)
            if not found <= bound:
                return on_core(f"|d{self.factor} V|", site, found, bound)
        return None


@dataclass(frozen=True)
class ProjectStep(ProtectsPast):
    """Keep (A_q+1 - A_q) V = 0 at every single step: the paper's form, kept to compare."""

    factor: str = "A"

    def hold(self, scope: Scope) -> Held:
        started = _FromAnchor(scope, self.factor).broken()  # what a step begins with is kept by every later one
        if started:
            raise_moved(started)
        return _FromStep(scope, self.factor)


class _FromStep(Held):
    def __init__(self, scope, factor):
        self.before = [in_float64(exact_factor(site, factor).detach()).clone() for site in scope.sites]
        self.factor, self.targets = factor, [(site, core_of(site)) for site in scope.sites]

    def before_step(self) -> None:
        for kept, (site, _) in zip(self.before, self.targets, strict=True):
            kept.copy_(in_float64(site.rows(self.factor)))

    def project(self) -> None:
        for kept, (site, core) in zip(self.before, self.targets, strict=True):
            rows = site.rows(self.factor)
            rows.copy_(kept + core.outside(in_float64(rows) - kept))

    def broken(self) -> str | None:
        for kept, (site, core) in zip(self.before, self.targets, strict=True):
            rows = in_float64(site.rows(self.factor))
            found, bound = off_core(rows - kept, core, size=rows)
            if not found <= bound:
                return on_core(f"|d{self.factor} V| of a step", site, found, bound)
        return None
