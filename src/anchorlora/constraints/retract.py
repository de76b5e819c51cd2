"""Retraction of a fresh block: A_0 <- A_0 P   (paper, eq. 16).

    A_0  (r, d_in)  start of the routing factor      V  (d_in, k)  core      P = I - V V^T, never formed

Changes no output while B = 0, and makes the state feasible: A V = 0, hence B A V = 0 for any later B. A block whose state is
feasible already, such as one whose training is taken up again, is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor, off_core
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from anchorlora.adapters import AdaptedLayer, Anchor


@dataclass(frozen=True)
class Retract(ProtectsPast):
    """Move a block's start, factor and anchor together, into the complement of the core."""

    factor: str = "A"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        for layer in anchor.layers:
            rows, core = exact_factor(layer, self.factor), core_of(layer)
            if not self._is_new(layer):
                found, bound = off_core(in_float64(rows), core, size=rows)
                if not found <= bound:
                    raise InvalidValue(
                        f"retracting {self.factor} at {layer.name} would change the function: its companion is not zero there; "
                        "retract a new block before its first step, or use ProjectDisplacement for a learned anchor"
                    )
                continue
            rows.copy_(core.outside(in_float64(rows)))
            layer.start_rows(self.factor).copy_(rows)
        return ActiveConstraint()

    def _is_new(self, layer: AdaptedLayer) -> bool:
        """Whether the companion is zero, in every process."""
        whole = layer.current.whole()
        return not bool((whole.B if self.factor == "A" else whole.A).any())
