"""Bilinear stabilization regularization (BSR): lambda / |I| sum_l ||E_l||_F^2 / n_el(E_l)   (paper, eq. 32 and 33).

    E = s (B A - B_0 A_0) V  (d_out, k)      V  (d_in, k)  wide basis, up to 64 directions      |I|  number of layers

Gradients with c = 2 lambda s / (|I| n_el): on B  c E (A V)^T, on A  c (B^T E) V^T. Only (d_out, k) and thinner is formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, Penalty, ProtectsPast
from anchorlora.devices import torch
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class EffectiveResponse(ProtectsPast):
    """Penalize the layer's effective change on the wide basis of earlier tasks   (BSR; paper, eqs. 32-33).

        lambda / |I| sum_l ||s (B A - B_0 A_0) V||_F^2 / n_el

    Args:
        strength: Weight lambda of the penalty.

    Example:
        >>> from anchorlora import Anchor, EffectiveResponse
        >>> model = tiny()
        >>> active = EffectiveResponse(1.0).begin_task(Anchor.of(model, wides=cores_of(model, k=8)))
        >>> with torch.no_grad():
        ...     active.add_penalty_grads()
        >>> active.readings()  # nothing has moved yet
        {'effective': 0.0}
    """

    strength: float = 1.0
    requires = ("wide",)

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to penalize the current block.

        Args:
            anchor: The task's anchor, with wide bases.

        Raises:
            InvalidValue: A layer has no wide basis.
            InvalidType: Factors are split over processes (FSDP2).
        """
        for layer in anchor.layers:
            if layer.wide is None:
                raise InvalidValue(f"EffectiveResponse needs a wide basis at {layer.name}; pass wides= to Anchor.of")
        return _Responding("effective", self.strength, anchor)


class _Responding(Penalty):
    def __init__(self, name, strength, anchor):
        super().__init__(name, strength, anchor)
        self.V = {layer.name: layer.wide.basis.to(layer.rows("A")) for layer in anchor.layers}

    def pieces(self, layer) -> tuple[Tensor, dict[str, Tensor]]:
        A, B, s, V = layer.factor("A"), layer.factor("B"), layer.current.scale, self.V[layer.name]
        A0, B0 = layer.start_factor("A"), layer.start_factor("B")
        routed = A @ V
        E = s * (B0 @ ((A - A0) @ V) + (B - B0) @ routed)  # from displacements: nothing cancels
        share = 1 / (len(self.layers) * E.numel())
        return share * E.square().sum(), {"B": 2 * s * share * E @ routed.T, "A": 2 * s * share * (B.T @ E) @ V.T}

    def stacked(self, stack) -> tuple[Tensor, dict[str, Tensor]]:
        def share() -> Tensor:
            sizes = [len(self.layers) * layer.factor("B").shape[0] * self.V[layer.name].shape[1] for layer in stack.layers]
            return V.new_tensor([2 * stack.layers[0].current.scale ** 2 / size for size in sizes])[:, None, None]

        V = stack.once("V", lambda: stack.bases(lambda layer: self.V[layer.name]))
        A0, B0 = (stack.once(name, lambda name=name: stack.of(lambda layer: layer.start_factor(name))) for name in ("A", "B"))
        A, B, weight = stack.factor("A"), stack.factor("B"), stack.once("share", share)
        routed = torch.bmm(A, V)
        E = torch.baddbmm(torch.bmm(B0, torch.bmm(A - A0, V)), B - B0, routed)  # from displacements: nothing cancels; times s
        G = weight * E
        return torch.dot(G.flatten(), E.flatten()) / 2, {"B": torch.bmm(G, routed.mT), "A": torch.bmm(torch.bmm(B.mT, G), V.mT)}
