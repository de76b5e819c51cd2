"""Weight residual projection, anchored: A <- A_0 + (A_raw - A_0) P   (paper, eq. 12, summed over the steps of a task).

    A_0  (r, d_in)  anchor      A_raw  what the optimizer made      V  (d_in, k)  core      P = I - V V^T, never formed

`ProjectStep` is the paper's own step-by-step form, A <- A_pre + (A_raw - A_pre) P. Both are equal in exact arithmetic. Step by
step, each write rounds once more and the roundings gather like a random walk; from the anchor there is one rounding in all,
and an infeasibility from any other source is repaired. Arithmetic in float64, storage in the parameter's own precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor, off_core, on_core, raise_moved
from anchorlora.devices import in_float64

if TYPE_CHECKING:
    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class ProjectDisplacement(ProtectsPast):
    """Keep (A - A_0) V = 0 whatever the optimizer did."""

    factor: str = "A"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        return _FromAnchor(anchor, self.factor)


class _FromAnchor(ActiveConstraint):
    def __init__(self, anchor, factor):
        for layer in anchor.layers:
            exact_factor(layer, factor)
        self.factor, self.targets = factor, [(layer, core_of(layer)) for layer in anchor.layers]

    def project(self) -> None:
        for layer, core in self.targets:
            rows, anchor = (
                layer.rows(self.factor),
                in_float64(layer.start_rows(self.factor)),
            )  # a later `Retract` may move the anchor
            rows.copy_(anchor + core.outside(in_float64(rows) - anchor))

    def violation(self) -> str | None:
        for layer, core in self.targets:
            rows, anchor = in_float64(layer.rows(self.factor)), in_float64(layer.start_rows(self.factor))
            found, bound = off_core(rows - anchor, core, size=rows)
            if not found <= bound:
                return on_core(f"|d{self.factor} V|", layer, found, bound)
        return None


@dataclass(frozen=True)
class ProjectStep(ProtectsPast):
    """Keep (A_q+1 - A_q) V = 0 at every single step: the paper's form, kept to compare."""

    factor: str = "A"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        started = _FromAnchor(anchor, self.factor).violation()  # what a step begins with is kept by every later one
        if started:
            raise_moved(started)
        return _FromStep(anchor, self.factor)


class _FromStep(ActiveConstraint):
    def __init__(self, anchor, factor):
        self.before = [in_float64(exact_factor(layer, factor).detach()).clone() for layer in anchor.layers]
        self.factor, self.targets = factor, [(layer, core_of(layer)) for layer in anchor.layers]

    def before_optimizer_step(self) -> None:
        for kept, (layer, _) in zip(self.before, self.targets, strict=True):
            kept.copy_(in_float64(layer.rows(self.factor)))

    def project(self) -> None:
        for kept, (layer, core) in zip(self.before, self.targets, strict=True):
            rows = layer.rows(self.factor)
            rows.copy_(kept + core.outside(in_float64(rows) - kept))

    def violation(self) -> str | None:
        for kept, (layer, core) in zip(self.before, self.targets, strict=True):
            rows = in_float64(layer.rows(self.factor))
            found, bound = off_core(rows - kept, core, size=rows)
            if not found <= bound:
                return on_core(f"|d{self.factor} V| of a step", layer, found, bound)
        return None
