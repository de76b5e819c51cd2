"""Gradient projection: grad A <- grad A P   (paper, eq. 10 and 17).

    A  (r, d_in)  routing factor      V  (d_in, k)  orthonormal core      P = I - V V^T, never formed

dA V = 0 holds under plain SGD only: an optimizer that scales coordinates separately turns the step back toward V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of
from anchorlora.constraints.stacks import outside, stacked_cores
from anchorlora.devices import in_float64

if TYPE_CHECKING:
    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class ProjectGradient(ProtectsPast):
    """Project the gradient of a factor onto the complement of the core: grad A <- grad A P   (paper, eqs. 10 and 17).

    By itself it protects nothing under an optimizer that scales coordinates separately, such as Adam: project the displacement too.

    Args:
        factor: The factor whose gradient is projected, "A".

    Example:
        >>> from anchorlora import Anchor, ProjectDisplacement, ProjectGradient, Retract, protect
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW(trained)
        >>> with protect(optimizer, anchor, [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]):
        ...     for p in trained:
        ...         p.grad = torch.randn_like(p)  # loss.backward() in a real loop
        ...     optimizer.step()
        >>> layer = anchor.layers[0]
        >>> gradient = layer.factor("A").grad
        >>> bool((gradient @ layer.core.basis).norm() < 1e-5 < gradient.norm())  # AdamW turns the step back toward V all the same
        True
    """

    factor: str = "A"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to project gradients.

        Args:
            anchor: The task's anchor, with cores.

        Raises:
            InvalidValue: A layer has no core, or one of another width.
        """
        return _Projecting(anchor, self.factor)


class _Projecting(ActiveConstraint):
    def __init__(self, anchor, factor):
        self.factor, self.targets = factor, [(layer, core_of(layer, factor)) for layer in anchor.layers]
        self.stacks = stacked_cores(anchor, factor)

    def before_optimizer_step(self) -> None:
        for stack, V in self.stacks:
            gradients = {i: g for i, layer in enumerate(stack.layers) if (g := layer.gradient_rows(self.factor)) is not None}
            if gradients:
                bases = V if len(gradients) == len(stack.layers) else V[list(gradients)]
                there = list(gradients.values())
                stack.write_to(there, outside(in_float64(stack.joined(there)), bases))
        for layer, core in self.targets:
            gradient = layer.gradient_rows(self.factor) if core.tokens is not None else None
            if gradient is not None:
                gradient.copy_(core.outside(in_float64(gradient)))
