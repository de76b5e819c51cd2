"""Is o-lora a brake? Controls on inc-lora's blocks that take O-LoRA's penalty apart, for docs/lab/results-mini.md.

F=benchmarks/mechanism.py
anchorlora grid mini --methods $F:second_moment,$F:rescaled --set threads=1 --out OUT/brake
anchorlora trace mini --methods inc-lora,o-lora,o-lora-hard,$F:second_moment,$F:rescaled --set threads=1 --out OUT/moves

g  gradient of the task's loss on A      p  gradient of the penalty on A, lambda sign(A_t A_<t^T) A_<t

method          first moment of A   second moment of A
inc-lora        g                   g
o-lora          g + p               g + p
second_moment   g                   g + p                  slowed as o-lora slows it, pushed nowhere
rescaled        g + p |g| / |p|     g + p |g| / |p|        pushed as the task pushes, layer by layer, hardly slowed
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora import ActiveConstraint, Anchor, Method, PerTask, RoutingOverlap
from anchorlora.errors import InvalidValue


@dataclass(frozen=True)
class SecondMomentOverlap(RoutingOverlap):
    """The gradient of the penalty fills Adam's second moment of A and not its first.

    It makes the optimizer's step on A again, so it must know the optimizer: Adam with these numbers and no decay of weights.
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        return _Slowing(self, super().begin_task(anchor), anchor)


class _Slowing(ActiveConstraint):
    def __init__(self, settings: SecondMomentOverlap, penalty: ActiveConstraint, anchor: Anchor) -> None:
        self.settings, self.penalty, self.layers, self.step = settings, penalty, anchor.layers, 0
        self.first = [torch.zeros_like(layer.rows("A")) for layer in self.layers]
        self.second = [torch.zeros_like(layer.rows("A")) for layer in self.layers]

    def begin(self, step: int) -> None:
        if step:
            raise InvalidValue(
                "SecondMomentOverlap keeps its moments in memory: it cannot go on within a task; start the run again"
            )

    def add_penalty_grads(self) -> None:
        self.task = [layer.gradient_rows("A").clone() for layer in self.layers]
        self.penalty.add_penalty_grads()

    def before_optimizer_step(self) -> None:
        self.before = [layer.rows("A").clone() for layer in self.layers]
        self.both = [layer.gradient_rows("A").clone() for layer in self.layers]

    def after_optimizer_step(self) -> None:
        (b1, b2), self.step = self.settings.betas, self.step + 1
        size, root = self.settings.learning_rate / (1 - b1**self.step), math.sqrt(1 - b2**self.step)
        parts = zip(self.layers, self.before, self.task, self.both, self.first, self.second, strict=True)
        for layer, before, task, both, first, second in parts:
            first.lerp_(task, 1 - b1)
            second.mul_(b2).addcmul_(both, both, value=1 - b2)
            layer.rows("A").copy_(before.addcdiv(first, (second.sqrt() / root).add_(self.settings.eps), value=-size))

    def readings(self) -> dict[str, float]:
        return self.penalty.readings()


@dataclass(frozen=True)
class RescaledOverlap(RoutingOverlap):
    """The gradient of the penalty, in every layer and step as long as the gradient of the task."""

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        return _Rescaling(super().begin_task(anchor), anchor)


class _Rescaling(ActiveConstraint):
    def __init__(self, penalty: ActiveConstraint, anchor: Anchor) -> None:
        self.penalty, self.layers = penalty, anchor.layers

    def add_penalty_grads(self) -> None:
        gradients = [layer.gradient_rows("A") for layer in self.layers]
        task = [gradient.clone() for gradient in gradients]
        self.penalty.add_penalty_grads()
        for gradient, g in zip(gradients, task, strict=True):
            gradient.copy_(g + as_long_as(g, gradient - g))

    def readings(self) -> dict[str, float]:
        return self.penalty.readings()


def as_long_as(g: Tensor, p: Tensor) -> Tensor:
    """p with the norm of g; 0 stays 0."""
    length = p.norm()
    return p * (g.norm() / length) if length > 0 else p


second_moment = Method("second_moment", PerTask(), (SecondMomentOverlap(0.5),))
rescaled = Method("rescaled", PerTask(), (RescaledOverlap(0.5),))
