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
from anchorlora.constraints.sensitivity import sensitivity

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

    strength: float = 100.0
    requires = ()

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
            mine = layer.rows("A").detach()
            self.kept[layer.name] = tuple((M.root.to(mine), mine.new_tensor(M.tail)) for M in (C, G))

    def pieces(self, layer) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        A, B = layer.factor("A").detach(), layer.factor("B").detach()
        A0, B0 = layer.start_factor("A"), layer.start_factor("B")
        (X, c), (Y, g) = self.kept[layer.name]
        square, r = layer.current.scale**2, len(A)
        L, R = torch.cat([B0, B - B0], dim=1), torch.cat([A - A0, A])  # from displacements: nothing cancels
        GL, RC = Y @ (Y.T @ L) + g * L, (R @ X) @ X.T + c * R
        N, M = L.T @ GL, RC @ R.T
        toward_L, toward_R = square * GL @ M, square * N @ RC
        return 0.5 * square * (N * M).sum(), {"B": toward_L[:, r:], "A": toward_R[:r] + toward_R[r:]}

    def stacked(self, stack) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        def of(side: int, part: int) -> Tensor:
            if part == 0:
                return stack.bases(lambda layer: self.kept[layer.name][side][0])
            return stack.of(lambda layer: self.kept[layer.name][side][1])[:, None, None]

        X, c, Y, g = (
            stack.once(f"{side}{part}", lambda side=side, part=part: of(side, part)) for side in (0, 1) for part in (0, 1)
        )
        A0, B0 = (stack.once(name, lambda name=name: stack.of(lambda layer: layer.start_factor(name))) for name in ("A", "B"))
        A, B = stack.factor("A"), stack.factor("B")
        square, r = stack.layers[0].current.scale ** 2, A.shape[1]
        L, R = torch.cat([B0, B - B0], dim=2), torch.cat([A - A0, A], dim=1)
        GL, RC = torch.bmm(Y, torch.bmm(Y.mT, L)) + g * L, torch.bmm(torch.bmm(R, X), X.mT) + c * R
        N, M = torch.bmm(L.mT, GL), torch.bmm(RC, R.mT)
        toward_L, toward_R = square * torch.bmm(GL, M), square * torch.bmm(N, RC)
        return 0.5 * square * (N * M).sum(), {"B": toward_L[:, :, r:], "A": toward_R[:, :r] + toward_R[:, r:]}
