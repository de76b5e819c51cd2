"""The interface of constraints: a `Constraint` is an immutable description, an `ActiveConstraint` its working memory for one task.

At each optimizer step, `protect` calls these hooks, each for all constraints before the next:

    after_backward          look at the gradients of the task loss
    add_penalty_grads       add the analytic gradient of penalties on factors, once per optimizer step
    before_optimizer_step   project the final gradients
    (the optimizer moves the parameters)
    after_raw_update        look at what the optimizer made
    after_optimizer_step    project the update, or measure what is left

This file and its neighbors import torch inside functions only, so that methods can be listed without it.

`Penalty` is the base of penalties on factors. Its gradient is weighted by lambda and added once per optimizer step, which equals
adding lambda times the penalty once to the mean loss of the step. (The official O-LoRA trainer adds it to every micro-batch's loss,
which multiplies lambda by the number of micro-batches wherever nothing divides by it.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from anchorlora.constraints.stacks import Stack, add_gradients, stacks_of
from anchorlora.devices import torch
from anchorlora.errors import InvalidType

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor
    from anchorlora.geometry import LayerCore


class ActiveConstraint:
    """A constraint while it acts on one task. Every hook is optional; one that is not overridden does nothing.

    Gradients are disabled while hooks run, except in `loss`.

    Example:
        A constraint that halves every update of A:

        >>> from anchorlora import Anchor, protect
        >>> from anchorlora.constraints import ActiveConstraint
        >>> class Halved(ActiveConstraint):
        ...     def __init__(self, anchor):
        ...         self.layers = anchor.layers
        ...
        ...     def before_optimizer_step(self):
        ...         self.before = [layer.rows("A").detach().clone() for layer in self.layers]
        ...
        ...     def after_optimizer_step(self):
        ...         for before, layer in zip(self.before, self.layers):
        ...             layer.rows("A").copy_((before + layer.rows("A")) / 2)
        >>> class Halve:
        ...     first_task = 1
        ...     requires = ()
        ...
        ...     def begin_task(self, anchor):
        ...         return Halved(anchor)
        ...
        ...     def end_task(self, anchor):
        ...         return {}
        >>> model = tiny()
        >>> anchor = Anchor.of(model)
        >>> A = anchor.layers[0].factor("A")
        >>> optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        >>> with protect(optimizer, anchor, [Halve()]):
        ...     before = A.detach().clone()
        ...     A.grad = torch.ones_like(A)
        ...     optimizer.step()
        >>> torch.allclose(before - A, torch.tensor(0.5))
        True
    """

    def loss(self, batch: Any, outputs: Any) -> Tensor | float:
        """Return a term for the task loss of one micro-batch; only for what needs the model's outputs, such as distillation.

        Args:
            batch: The micro-batch, as the loop has it.
            outputs: What the model returned for it.

        Returns:
            A scalar that the loop adds to the task loss. `protect` refuses a step of a loop that never asks for it.
        """
        return 0.0

    def see(self, active: Sequence[ActiveConstraint]) -> None:
        """Receive all active constraints of the task, before the first step; for a constraint that reads the others.

        Args:
            active: The active constraints in order, this one included.
        """

    def begin(self, step: int) -> None:
        """Prepare for the first step that will be made.

        Args:
            step: Optimizer steps already made in this task; greater than 0 when training is resumed.
        """

    def after_backward(self) -> None:
        """Look at the gradients of the task loss; do not write."""

    def add_penalty_grads(self) -> None:
        """Add the gradient of a penalty on factors to `.grad`, once per optimizer step."""

    def before_optimizer_step(self) -> None:
        """Project the gradients, which are final now; parameters have not moved yet."""

    def after_raw_update(self) -> None:
        """Look at what the optimizer made, before anything is projected; do not write."""

    def after_optimizer_step(self) -> None:
        """Project the update, or measure what is left of it. Calls `project` unless overridden."""
        self.project()

    def project(self) -> None:
        """Remove from the factors what the constraint forbids. Also called after a step that an exception interrupted."""

    def violation(self) -> str | None:
        """Return a sentence with layer and numbers if the constraint does not hold on the live parameters, else None."""
        return None

    def release(self) -> None:
        """Remove what was attached; the task is over, possibly by an exception."""

    def readings(self) -> dict[str, float]:
        """Return values of the last step for the log, such as that of a penalty, by name."""
        return {}


@runtime_checkable
class Constraint(Protocol):
    """An immutable description of a constraint: a frozen dataclass with these two properties and two methods.

    Example:
        >>> from dataclasses import dataclass
        >>> from anchorlora import Shared
        >>> from anchorlora.constraints import ActiveConstraint, Constraint
        >>> @dataclass(frozen=True)
        ... class Nothing:
        ...     first_task = 2
        ...     requires = ()
        ...
        ...     def begin_task(self, anchor):
        ...         return ActiveConstraint()
        ...
        ...     def end_task(self, anchor):
        ...         return {}
        >>> isinstance(Nothing(), Constraint)
        True
        >>> (Shared() + Nothing()).definition
        'Shared() + Nothing()'
    """

    @property
    def first_task(self) -> int:
        """The first task, counted from 1, on which it acts; 2 where it protects a past."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Needs of the past: "core", "wide" (the wide basis), "start" (the model at the task's start), or nothing."""

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to act on one task.

        Args:
            anchor: The adapted layers, their factors at the task's start, and the directions to protect.

        Returns:
            The working memory for this task.

        Raises:
            AnchorloraError: The anchor lacks what the constraint needs.
        """

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return what later tasks may know of a finished task.

        Args:
            anchor: The anchor of the finished task.

        Returns:
            Name -> tensor; later tasks find them in `anchor.past`.
        """


def begin_task(constraint: Constraint, anchor: Anchor) -> ActiveConstraint:
    """Begin a task for a constraint."""
    active = constraint.begin_task(anchor)
    if not isinstance(active, ActiveConstraint):
        raise InvalidType(f"begin_task of {type(constraint).__name__} returned {active!r:.60}, not an ActiveConstraint")
    return active


def end_task(constraint: Constraint, anchor: Anchor) -> dict[str, Tensor]:
    """End a task for a constraint, and return what it remembers."""
    kept = constraint.end_task(anchor)
    if not isinstance(kept, dict) or not all(isinstance(value, torch.Tensor) for value in kept.values()):
        name = type(constraint).__name__
        raise InvalidType(f"end_task of {name} returned {kept!r:.60}; return a dict of tensors by name, {{}} for nothing")
    return kept


@runtime_checkable
class ProvidesCores(Protocol):
    """A constraint that chooses the core itself, in place of the leading directions of feature rows; at most one in a method."""

    def cores(self, past: Mapping[str, Tensor]) -> dict[str, LayerCore]:
        """Return the core of every adapted layer, as the next task must keep it."""


class ProtectsPast:
    """Base of most constraints: they act from the second task on, remember nothing of their own, and read the core. `reads` has the
    prefixes of the names in `Anchor.past` that a constraint needs from earlier tasks; empty if it needs none.
    """

    first_task = 2
    reads = ""
    requires: tuple[str, ...] = ("core",)

    @property
    def closes(self) -> tuple[str, ...]:
        """Guarantees after every step, of `anchorlora.methods.preserves.CLOSABLE`; nothing unless overridden."""
        return ()

    @property
    def needs(self) -> str:
        """Needs of earlier tasks besides their adapters, in words; "" for nothing, or for feature rows alone."""
        return ""

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return nothing: later tasks need to know nothing."""
        return {}


class Penalty(ActiveConstraint):
    """Base of penalties on factors: subclasses give one layer's value and gradients, this sums and adds them.

    Args:
        name: Name of the unweighted value in the log.
        strength: Weight lambda of the penalty.
        anchor: The task's anchor.

    Factors that are split over processes (FSDP2) are gathered for every step, and each process takes its rows of the gradient.

    Example:
        A penalty of half the squared norm of B:

        >>> from anchorlora import Anchor
        >>> from anchorlora.constraints.base import Penalty
        >>> class Decay(Penalty):
        ...     def pieces(self, layer):
        ...         B = layer.factor("B").detach()
        ...         return 0.5 * B.square().sum(), {"B": B}
        >>> decay = Decay("decay", 0.1, Anchor.of(tiny()))
        >>> decay.add_penalty_grads()
        >>> decay.readings()
        {'decay': 0.0}
    """

    reads: tuple[str, ...] = ("A", "B")  # the factors that `stacked` reads, so that layers of one shape in these are one stack

    def __init__(self, name: str, strength: float, anchor: Anchor) -> None:
        self.name, self.strength, self.layers = name, strength, anchor.layers
        self.split = any(layer.is_split(factor) for layer in anchor.layers for factor in ("A", "B"))
        stacked = type(self).stacked is not Penalty.stacked and not self.split
        self.stacks = stacks_of(anchor.layers, *(self.reads if stacked else ()))
        self.earlier = {layer.name: layer.history.whole() for layer in anchor.layers if layer.history} if self.split else {}
        self.values: list[Tensor] = []

    def pieces(self, layer: AdaptedLayer) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one layer's unweighted penalty and its gradients.

        Args:
            layer: The adapted layer.

        Returns:
            The value (scalar), and factor name -> gradient, shaped like the factor.
        """
        return self.stacked(Stack((layer,), batched=False))

    def stacked(self, stack: Stack) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the same of several layers at once, for an accelerator; a penalty has this or `pieces`.

        Args:
            stack: Layers of one shape, or one by itself, whose tensors have no first dimension.

        Returns:
            The sum of their values (scalar), and factor name -> gradients, (n, ..).
        """
        raise NotImplementedError

    def add_penalty_grads(self) -> None:
        """Sum the penalty over layers and add its weighted gradient to each factor that trains."""
        self.values = []
        for stack in self.stacks:
            value, gradients = self.stacked(stack) if stack.batched else self.pieces(self._gather(*stack.layers))
            self.values.append(value)
            add_gradients(stack, gradients, weight=self.strength)

    def _gather(self, layer: AdaptedLayer) -> AdaptedLayer:
        """The layer with whole factors, if any are split; all processes must call it."""
        if not self.split:
            return layer
        return replace(layer, current=layer.current.whole(), start=layer.start.whole(), history=self.earlier.get(layer.name))

    def readings(self) -> dict[str, float]:
        """Return the unweighted value of the last step, by the penalty's name."""
        return {self.name: float(sum(self.values))}
