"""What penalties on factors share: the analytic gradient, weighted once, added once per optimizer step.

This equals adding lambda times the penalty once to the mean loss of the step. (Adding it to every micro-batch's loss, as the
official O-LoRA trainer does, multiplies lambda by the number of micro-batches wherever nothing divides by it.)
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from anchorlora.constraints.base import Held

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Scope, Site


class Penalty(Held):
    """Subclasses give one site's value and gradients; this adds them up and adds them in."""

    def __init__(self, name: str, strength: float, scope: Scope) -> None:
        for site in scope.sites:
            if site.is_split("A"):
                raise TypeError(
                    f"the penalty {name!r} reads whole factors, and those of {site.layer} are split over processes (FSDP2); "
                    "use DDP, or hard constraints alone: Retract, Freeze, ProjectGradient, ProjectDisplacement"
                )
        self.name, self.strength, self.sites = name, strength, scope.sites
        self.value: Tensor | float = 0.0

    @abstractmethod
    def pieces(self, site: Site) -> tuple[Tensor, dict[str, Tensor]]:
        """The unweighted value (scalar) and its gradient by factor name, shaped like the factor."""

    def add_gradients(self) -> None:
        self.value = 0.0
        for site in self.sites:
            value, gradients = self.pieces(site)
            self.value = self.value + value
            for name, gradient in gradients.items():
                parameter = site.factor(name)
                if not parameter.requires_grad:
                    continue
                gradient = self.strength * gradient
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def readings(self) -> dict[str, float]:
        """The unweighted value."""
        return {self.name: float(self.value)}
