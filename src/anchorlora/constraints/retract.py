"""Retraction of a fresh block: A_0 <- A_0 P   (paper, eq. 16).

    A_0  (r, d_in)  start of the routing factor      V  (d_in, k)  core      P = I - V V^T, never formed

Changes no output while B = 0, and makes the state feasible: A V = 0, hence B A V = 0 for any later B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor

if TYPE_CHECKING:
    from anchorlora.adapters import Scope


@dataclass(frozen=True)
class Retract(ProtectsPast):
    """Move a block's start, factor and anchor together, into the complement of the core."""

    factor: str = "A"

    def hold(self, scope: Scope) -> Held:
        for site in scope.sites:
            companion = site.factor("B" if self.factor == "A" else "A")
            if bool(companion.any()):
                raise ValueError(
                    f"retracting {self.factor} at {site.layer} would change the function: its companion is not zero there; "
                    "retract a new block before its first step, or use ProjectDisplacement for a learned anchor"
                )
            parameter = exact_factor(site, self.factor)
            parameter.copy_(core_of(site).outside(parameter.double()))
            site.start(self.factor).copy_(parameter)
        return Held()
