"""The one interface: a constraint is an immutable description, its working memory a `ActiveConstraint` that lives for one task.

`protect` calls the moments of all constraints at each optimizer step, in this order, and each for all before the next:

    arrived         look: the gradients of the task loss, nothing added yet
    add_gradients   penalties on factors add their analytic gradient, once per optimizer step
    before_step     gradients are final: project them
    (the optimizer moves the parameters)
    moved           look: what the optimizer made, nothing projected yet
    after_step      project the move, or measure it

This file and its neighbors import torch inside functions only, so that methods can be listed without it.

What penalties on factors share: the analytic gradient, weighted once, added once per optimizer step.

This equals adding lambda times the penalty once to the mean loss of the step. (Adding it to every micro-batch's loss, as the
official O-LoRA trainer does, multiplies lambda by the number of micro-batches wherever nothing divides by it.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from anchorlora.errors import InvalidType

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor


class ActiveConstraint:
    """A constraint while it holds one task.  A moment left alone does nothing."""

    def loss(self, batch: Any, outputs: Any) -> Tensor | float:
        """Added to the task loss of a micro-batch; only for what needs the model's outputs (distillation)."""
        return 0.0

    def see(self, active: Sequence[ActiveConstraint]) -> None:
        """All constraints of the task hold now: for one that reads the others."""

    def begin(self, step: int) -> None:
        """Training begins; step: optimizer steps of this task made before, where it is taken up again."""

    def after_backward(self) -> None:
        """The gradients of the task loss are there: look, do not write."""

    def add_penalty_grads(self) -> None:
        """Add the gradient of a penalty on factors to `.grad`, once per optimizer step."""

    def before_optimizer_step(self) -> None:
        """Gradients are final, parameters untouched."""

    def after_raw_update(self) -> None:
        """The optimizer has moved the parameters and nothing is projected yet: look, do not write."""

    def after_optimizer_step(self) -> None:
        """The optimizer has moved the parameters: project the move, or measure what is left of it."""
        self.project()

    def project(self) -> None:
        """Take out of the factors, as they stand, what its promise forbids.  Also called for a step that an exception cut short."""

    def violation(self) -> str | None:
        """What of its promise does not hold on the live parameters, with layer and numbers; None where it promises nothing."""
        return None

    def release(self) -> None:
        """The task is over, also by an exception: take back what was attached."""

    def readings(self) -> dict[str, float]:
        """What the log should know of the last step, such as the value of a penalty."""
        return {}


@runtime_checkable
class Constraint(Protocol):
    """An immutable description: `begin_task` starts it for one task, `end_task` says what later tasks may know."""

    @property
    def first_task(self) -> int:
        """The first task (1-based) that it applies to; 2 where it protects a past."""
        ...

    @property
    def requires(self) -> tuple[str, ...]:
        """What it needs of past feature rows: "core", "wide", both or nothing."""
        ...

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start one task."""
        ...

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """After a task: what later tasks may know, by name; they find it in `anchor.past`."""
        ...


class ProtectsPast:
    """What most constraints share: they start with the second task, remember nothing of their own, and read a core."""

    first_task = 2
    requires: tuple[str, ...] = ("core",)

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        return {}


class Penalty(ActiveConstraint):
    """Subclasses give one site's value and gradients; this adds them up and adds them in."""

    def __init__(self, name: str, strength: float, anchor: Anchor) -> None:
        for layer in anchor.layers:
            if layer.is_split("A"):
                raise InvalidType(
                    f"the penalty {name!r} reads whole factors, and those of {layer.name} are split over processes (FSDP2); "
                    "use DDP, or hard constraints alone: Retract, Freeze, ProjectGradient, ProjectDisplacement"
                )
        self.name, self.strength, self.layers = name, strength, anchor.layers
        self.value: Tensor | float = 0.0

    @abstractmethod
    def pieces(self, layer: AdaptedLayer) -> tuple[Tensor, dict[str, Tensor]]:
        """The unweighted value (scalar) and its gradient by factor name, shaped like the factor."""

    def add_penalty_grads(self) -> None:
        self.value = 0.0
        for layer in self.layers:
            value, gradients = self.pieces(layer)
            self.value = self.value + value
            for name, gradient in gradients.items():
                parameter = layer.factor(name)
                if not parameter.requires_grad:
                    continue
                gradient = self.strength * gradient
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def readings(self) -> dict[str, float]:
        """The unweighted value."""
        return {self.name: float(self.value)}
