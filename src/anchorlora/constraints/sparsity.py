"""Effective sparsity: lambda sum_l |s B_l A_l|_1 over all d_out x d_in entries   (N-LoRA, as the paper states it).

    A  (r, d_in)  current routing factor      B  (d_out, r)  current output basis      S = sign(B A), 0 at 0

Gradients: on B  lambda s S A^T, on A  lambda s B^T S; both vanish at B = 0. B A is formed a few rows at a time. (The official code
computes |A B|_1, which is r x r and exists only where d_in = d_out; its weights do not transfer.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, Penalty, ProtectsPast
from anchorlora.devices import in_float64, torch

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor

ROWS = 256  # rows of B A that exist at a time


@dataclass(frozen=True)
class EffectiveSparsity(ProtectsPast):
    """Penalize the entries of the current block's effect on the weight, from the first task on   (N-LoRA).

        lambda sum_l |s B_l A_l|_1

    Args:
        strength: Weight lambda of the penalty.

    Example:
        >>> from anchorlora import Anchor, EffectiveSparsity
        >>> active = EffectiveSparsity().begin_task(Anchor.of(tiny()))
        >>> with torch.no_grad():
        ...     active.add_penalty_grads()
        >>> active.readings()  # B is zero at the start
        {'sparsity': 0.0}
    """

    strength: float = 1e-6
    first_task = 1
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to penalize the current block.

        Args:
            anchor: The task's anchor.

        Raises:
            InvalidType: Factors are split over processes (FSDP2).
        """
        return _Thinning("sparsity", self.strength, anchor)


class _Thinning(Penalty):
    def pieces(self, layer) -> tuple[Tensor, dict[str, Tensor]]:
        A, B, s = layer.factor("A"), layer.factor("B"), layer.current.scale
        total, on_a, on_b = in_float64(A.new_zeros(())), torch.zeros_like(A), torch.empty_like(B)
        for start in range(0, len(B), ROWS):
            rows = B[start : start + ROWS]
            effect = rows @ A
            total += in_float64(effect.abs()).sum()
            sign = effect.sign_()
            on_b[start : start + ROWS] = sign @ A.T
            on_a += rows.T @ sign
        return s * total, {"A": s * on_a, "B": s * on_b}
