"""Gradient projection: grad A <- grad A P   (paper, eq. 10 and 17).

    A  (r, d_in)  routing factor      V  (d_in, k)  orthonormal core      P = I - V V^T, never formed

dA V = 0 holds under plain SGD only: an optimizer that scales coordinates separately turns the step back toward V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of
from anchorlora.constraints.stacks import StackedCores, outside
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
        >>> from anchorlora import Anchor, ProjectGradient, protect
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW(trained)
        >>> with protect(optimizer, anchor, [ProjectGradient("A")]):
        ...     for p in trained:
        ...         p.grad = torch.randn_like(p)  # loss.backward() in a real loop
        ...     optimizer.step()
        >>> layer = anchor.layers[0]
        >>> moved = layer.factor("A") - layer.start_factor("A")
        >>> bool((moved @ layer.core.basis).norm() / moved.norm() > 0.01)  # AdamW has turned the step back toward V
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
        self.factor, self.targets = factor, [(layer, core_of(layer)) for layer in anchor.layers]
        self.stacked = StackedCores.of(anchor, factor)

    def before_optimizer_step(self) -> None:
        there = {layer.name: gradient for layer, _ in self.targets if (gradient := layer.gradient_rows(self.factor)) is not None}
        if self.stacked and len(there) == len(self.targets):
            for stack, V in self.stacked.stacks:
                gradients = in_float64(stack.of(lambda layer: there[layer.name]))
                stack.write_to([there[layer.name] for layer in stack.layers], outside(gradients, V))
            return
        for layer, core in self.targets:
            gradient = layer.gradient_rows(self.factor)
            if gradient is not None:
                gradient.copy_(core.outside(in_float64(gradient)))
