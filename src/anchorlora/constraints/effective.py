"""Bilinear stabilization regularization (BSR): lambda / |I| sum_l ||E_l||_F^2 / n_el(E_l)   (paper, eq. 32 and 33).

    E = s (B A - B_0 A_0) V  (d_out, k)      V  (d_in, k)  wide basis, up to 64 directions      |I|  number of layers

Gradients with c = 2 lambda s / (|I| n_el): on B  c E (A V)^T, on A  c (B^T E) V^T. Only (d_out, k) and thinner is formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held, Penalty, ProtectsPast

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Scope


@dataclass(frozen=True)
class EffectiveResponse(ProtectsPast):
    """Penalise what the current block really does to the wide historical basis, with weight `strength` (lambda)."""

    strength: float = 1.0
    reads = ("wide",)

    def hold(self, scope: Scope) -> Held:
        for site in scope.sites:
            if site.wide is None:
                raise ValueError(f"EffectiveResponse needs a wide basis at {site.layer}; pass wides= to Scope.of")
        return _Responding("effective", self.strength, scope)


class _Responding(Penalty):
    def __init__(self, name, strength, scope):
        super().__init__(name, strength, scope)
        self.V = {site.layer: site.wide.basis.to(site.factor("A")) for site in scope.sites}
        self.sites_count = len(scope.sites)

    def pieces(self, site) -> tuple[Tensor, dict[str, Tensor]]:
        A, B, s, V = site.factor("A"), site.factor("B"), site.current.scale, self.V[site.layer]
        A0, B0 = site.start("A"), site.start("B")
        routed = A @ V
        E = s * (B0 @ ((A - A0) @ V) + (B - B0) @ routed)  # from displacements: nothing cancels
        share = 1 / (self.sites_count * E.numel())
        return share * E.square().sum(), {"B": 2 * s * share * E @ routed.T, "A": 2 * s * share * (B.T @ E) @ V.T}
