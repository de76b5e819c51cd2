"""Bilinear stabilization regularization (BSR): lambda / |I| sum_l ||E_l||_F^2 / n_el(E_l)   (paper, eq. 32 and 33).

    E = s (B A - B_0 A_0) V  (d_out, k)      V  (d_in, k)  wide basis, up to 64 directions      |I|  number of layers

Gradients with c = 2 lambda s / (|I| n_el): on B  c E (A V)^T, on A  c (B^T E) V^T. Only (d_out, k) and thinner is formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, Penalty, ProtectsPast
from anchorlora.constraints.stacks import plus_product
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
        self.known = {}
        for layer in anchor.layers:
            V, s = layer.wide.basis.to(layer.rows("A")), layer.current.scale
            share = 1 / (len(anchor.layers) * layer.current.B.shape[0] * V.shape[1])
            self.known[layer.name] = V, V.new_tensor([[share]]), V.new_tensor([[2 * s * share]])

    def stacked(self, stack) -> tuple[Tensor, dict[str, Tensor]]:
        V = stack.once("V", lambda: stack.bases(lambda layer: self.known[layer.name][0]))
        share, weight = (stack.once(f"{i}", lambda i=i: stack.of(lambda layer: self.known[layer.name][i])) for i in (1, 2))
        A, B, A0, B0 = stack.factor("A"), stack.factor("B"), stack.start("A"), stack.start("B")
        dot, s = stack.product, stack.layers[0].current.scale
        routed = dot(A, V)
        E = plus_product(dot(B - B0, routed), B0, dot(A - A0, V), scale=s)  # from displacements: nothing cancels
        value = torch.dot(share.flatten(), E.square().sum((-2, -1)).flatten())
        return value, {"B": dot(weight * E, routed.mT), "A": dot(weight * dot(B.mT, E), V.mT)}
