"""Stay where old answers do not change: the predicted KL of earlier answers as a penalty on the effective update.

    dW = s (B A - B_0 A_0)      C  (d_in, d_in), G  (d_out, d_out)  what earlier answers depend on (`AnswerSensitivity`)
    (mu/2) sum_l tr(G dW C dW^T)      predicted KL in nats, by the Fisher with its sides taken apart (Kronecker)

Thin, with dW = s L R, L = [B_0, dB] and R = [dA; A] (L = B, R = A for a fresh block):

    N = L^T G L,  M = R C R^T      penalty (mu s^2 / 2) tr(N M)      gradients mu s^2 G L M by L, mu s^2 N R C by R

It promises nothing exact. G and C are low rank plus identity: without their tails the optimizer would go where nothing counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, Penalty, ProtectsPast
from anchorlora.constraints.sensitivity import MEMORY, sensitivity
from anchorlora.constraints.stacks import plus_product
from anchorlora.devices import torch

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class KroneckerBrake(ProtectsPast):
    """Penalize the predicted change of earlier answers, in nats of KL, as a quadratic form of the effective update.

        (mu/2) sum_l tr(G dW C dW^T)

    It needs `AnswerSensitivity` beside it, which remembers G and C in constant size.

    Args:
        strength: Weight mu: nats of task loss that one predicted nat of KL is worth.

    Example:
        >>> from anchorlora import Anchor
        >>> from anchorlora.constraints import AnswerSensitivity, KroneckerBrake
        >>> model = tiny()
        >>> def losses(count):
        ...     for i in range(count):
        ...         ids = torch.arange(i, i + 8)[None]
        ...         yield model(input_ids=ids, labels=ids).loss
        >>> past = AnswerSensitivity(examples=2).end_task(Anchor.of(model, losses=losses))
        >>> active = KroneckerBrake().begin_task(Anchor.of(model, past=past))
        >>> with torch.no_grad():
        ...     active.add_penalty_grads()
        >>> active.readings()  # nothing has moved yet
        {'predicted_kl': 0.0}
    """

    strength: float = 30.0
    requires = ()
    reads = MEMORY

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to brake.

        Args:
            anchor: The task's anchor; its `past` holds what `AnswerSensitivity` remembered.

        Raises:
            InvalidValue: Nothing is remembered.
            UnknownName: What is remembered belongs to another adapter.
        """
        return _Braking("predicted_kl", self.strength, anchor)


class _Braking(Penalty):
    def __init__(self, name, strength, anchor):
        super().__init__(name, strength, anchor)
        self.kept = {}
        for layer in anchor.layers:
            A, B = layer.current.A, layer.current.B
            C, G = sensitivity(anchor.past, layer.name, d_in=A.shape[1], d_out=B.shape[0])
            factor = layer.rows("A").detach()
            self.kept[layer.name] = tuple((M.root.to(factor), factor.new_tensor([[M.tail]])) for M in (C, G))
        self.fresh = not any(bool(layer.start.whole().B.any()) for layer in anchor.layers)

    def stacked(self, stack) -> tuple[Tensor, dict[str, Tensor]]:
        X, Y = (stack.once(f"root {i}", lambda i=i: stack.bases(lambda layer: self.kept[layer.name][i][0])) for i in (0, 1))
        c, g = (stack.once(f"tail {i}", lambda i=i: stack.of(lambda layer: self.kept[layer.name][i][1])) for i in (0, 1))
        A, B, s = stack.factor("A"), stack.factor("B"), stack.layers[0].current.scale
        L, R, r = B, A, 0
        if not self.fresh:
            A0, B0 = stack.start("A"), stack.start("B")
            L, R, r = torch.cat([B0, B - B0], dim=-1), torch.cat([A - A0, A], dim=-2), A.shape[-2]  # displacements: nothing cancels
        dot = stack.product
        GL, RC = plus_product(g * L, Y, dot(Y.mT, L)), plus_product(c * R, dot(R, X), X.mT)
        N, M = dot(s * s * L.mT, GL), dot(s * s * RC, R.mT)
        toward_A, toward_B = dot(N, RC), dot(GL, M)[..., r:]
        toward_A = toward_A[..., :r, :] + toward_A[..., r:, :] if r else toward_A
        return (N * M).sum() / (2 * s * s), {"B": toward_B, "A": toward_A}
