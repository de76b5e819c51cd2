"""A frozen factor: dB = 0   (paper, eq. 9).  Closes the companion path s dB A_0 V of a learned anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held, ProtectsPast

if TYPE_CHECKING:
    from anchorlora.adapters import Scope


@dataclass(frozen=True)
class Freeze(ProtectsPast):
    """Keep one factor bitwise as it is, whether or not the optimizer holds it; `protect` gives it back afterwards."""

    factor: str = "B"
    reads = ()

    def hold(self, scope: Scope) -> Held:
        for site in scope.sites:
            parameter = site.factor(self.factor)
            parameter.requires_grad_(False)
            parameter.grad = None  # a stale gradient would let AdamW move a frozen factor once more
        return Held()
