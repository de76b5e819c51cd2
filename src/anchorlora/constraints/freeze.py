"""A frozen factor: dB = 0   (paper, eq. 11).  Closes the companion path s dB A_0 V of a learned anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held, ProtectsPast
from anchorlora.constraints.checks import processes
from anchorlora.devices import in_float64

if TYPE_CHECKING:
    from anchorlora.adapters import Scope


@dataclass(frozen=True)
class Freeze(ProtectsPast):
    """Keep one factor bitwise as it is, whether or not the optimizer holds it; `protect` gives it back afterwards."""

    factor: str = "B"
    reads = ()

    def hold(self, scope: Scope) -> Held:
        return _Frozen(scope, self.factor)


class _Frozen(Held):
    def __init__(self, scope, factor):
        self.factor, self.sites = factor, scope.sites
        self.start = [site.start_rows(factor).detach().clone() for site in scope.sites]  # the anchor's, whatever the factor is now
        self.hooks = []
        for site in scope.sites:
            parameter = site.factor(factor)
            if processes() > 1 and parameter.requires_grad and not site.is_split(factor):
                # DistributedDataParallel waits for the gradient of whatever trained when it was built: it gets zeros
                self.hooks.append(parameter.register_hook(lambda gradient: gradient.new_zeros(gradient.shape)))
            else:
                parameter.requires_grad_(False)

    def before_step(self) -> None:
        for site in self.sites:
            site.factor(self.factor).grad = None  # a stale one, or one made in spite of the flag, would let AdamW move it

    def broken(self) -> str | None:
        for site, start in zip(self.sites, self.start, strict=True):
            moved = float((in_float64(site.rows(self.factor)) - in_float64(start)).norm())
            if moved != 0.0:  # also for NaN
                return f"the frozen factor {self.factor} at {site.layer} has moved by {moved:.1e}, and 0 is allowed"
        return None

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()
