"""The one interface: a constraint is an immutable description, its working memory a `Held` that lives for one task.

`protect` calls the moments of all constraints at each optimizer step, in this order, and each for all before the next:

    arrived         look: the gradients of the task loss, nothing added yet
    add_gradients   penalties on factors add their analytic gradient, once per optimizer step
    before_step     gradients are final: project them
    (the optimizer moves the parameters)
    moved           look: what the optimizer made, nothing projected yet
    after_step      project the move, or measure it

This file and its neighbours import torch inside functions only, so that methods can be listed without it.

What penalties on factors share: the analytic gradient, weighted once, added once per optimizer step.

This equals adding lambda times the penalty once to the mean loss of the step. (Adding it to every micro-batch's loss, as the
official O-LoRA trainer does, multiplies lambda by the number of micro-batches wherever nothing divides by it.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Scope, Site


class Held:
    """A constraint while it holds one task.  A moment left alone does nothing."""

    def loss(self, batch: Any, outputs: Any) -> Tensor | float:
        """Added to the task loss of a micro-batch; only for what needs the model's outputs (distillation)."""
        return 0.0

    def meet(self, held: Sequence[Held]) -> None:
        """All constraints of the task hold now: for one that reads the others."""

    def begin(self, step: int) -> None:
        """Training begins; step: optimizer steps of this task made before, where it is taken up again."""

    def arrived(self) -> None:
        """The gradients of the task loss are there: look, do not write."""

    def add_gradients(self) -> None:
        """Add the gradient of a penalty on factors to `.grad`, once per optimizer step."""

    def before_step(self) -> None:
        """Gradients are final, parameters untouched."""

    def moved(self) -> None:
        """The optimizer has moved the parameters and nothing is projected yet: look, do not write."""

    def after_step(self) -> None:
        """The optimizer has moved the parameters: project the move, or measure what is left of it."""
        self.project()

    def project(self) -> None:
        """Take out of the factors, as they stand, what its promise forbids.  Also called for a step that an exception cut short."""

    def broken(self) -> str | None:
        """What of its promise does not hold on the live parameters, with layer and numbers; None where it promises nothing."""
        return None

    def release(self) -> None:
        """The task is over, also by an exception: take back what was attached."""

    def readings(self) -> dict[str, float]:
        """What the log should know of the last step, such as the value of a penalty."""
        return {}


@runtime_checkable
class Constraint(Protocol):
    """An immutable description: `hold` starts it for one task, `remember` says what later tasks may know."""

    @property
    def from_task(self) -> int:
        """The first task (1-based) that it applies to; 2 where it protects a past."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """What it needs of past feature rows: "core", "wide", both or nothing."""
        ...

    def hold(self, scope: Scope) -> Held:
        """Start one task."""
        ...

    def remember(self, scope: Scope) -> dict[str, Tensor]:
        """After a task: what later tasks may know, by name; they find it in `scope.past`."""
        ...


class ProtectsPast:
    """What most constraints share: they start with the second task, remember nothing of their own, and read a core."""

    from_task = 2
    reads: tuple[str, ...] = ("core",)

    def remember(self, scope: Scope) -> dict[str, Tensor]:
        return {}


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
