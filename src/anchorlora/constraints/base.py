"""The one interface: a constraint is an immutable description, its working memory a `Held` that lives for one task.

`protect` puts constraints on any torch optimizer. At each step, in this order, and each for all constraints before the next:

    arrived         look: the gradients of the task loss, nothing added yet
    add_gradients   penalties on factors add their analytic gradient, once per optimizer step
    before_step     gradients are final: project them
    (the optimizer moves the parameters)
    moved           look: what the optimizer made, nothing projected yet
    after_step      project the move, or measure it

This file and its neighbours import torch inside functions only, so that methods can be listed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from anchorlora.adapters import Scope


class Held:
    """A constraint while it holds one task.  A moment left alone does nothing."""

    def loss(self, batch: Any, outputs: Any) -> Tensor | float:
        """Added to the task loss of a micro-batch; only for what needs the model's outputs (distillation)."""
        return 0.0

    def meet(self, held: Sequence[Held]) -> None:
        """All constraints of the task hold now: for one that reads the others."""

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


@contextmanager
def protect(optimizer: Optimizer, scope: Scope, constraints: Sequence[Constraint]) -> Iterator[list[Held]]:
    """Hold `constraints` on `scope` while the block runs, around any loop that calls `optimizer.step()`.

    Yields their working memory, in order. Hooks and frozen factors are taken back when the block ends, also by an exception.
    Raises TypeError for an optimizer whose steps cannot be followed and ValueError when it does not hold the factors.
    """
    import torch

    inner = innermost(optimizer)
    flags = [(p, p.requires_grad) for site in scope.sites for p in (site.factor("A"), site.factor("B"))]
    _check_holds(inner, scope)
    hooks: list[Any] = []
    try:
        with torch.no_grad():
            held = [constraint.hold(scope) for constraint in constraints]
            for h in held:
                h.meet(held)
        unasked = {id(h): h for h in held if type(h).loss is not Held.loss}

        @torch.no_grad()  # hooks run outside the optimizer's own no_grad
        def before(*_: Any) -> None:
            if unasked:
                names = ", ".join(type(h).__name__.strip("_") for h in unasked.values())
                raise TypeError(
                    f"{names} adds to the loss, but this loop never asks for it: add h.loss(batch, outputs) of every held"
                )
            for moment in (Held.arrived, Held.add_gradients, Held.before_step):
                _each(held, moment)

        @torch.no_grad()
        def after(*_: Any) -> None:
            for moment in (Held.moved, Held.after_step):
                _each(held, moment)

        for h in list(unasked.values()):
            _note_first_call(h, unasked)
        hooks = [inner.register_step_pre_hook(before), inner.register_step_post_hook(after)]
        yield held
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _each(held: Sequence[Held], moment: Callable[[Held], None]) -> None:
    for h in held:
        getattr(h, moment.__name__)()


def innermost(optimizer: Any) -> Optimizer:
    """The torch optimizer that really steps, below wrappers such as Accelerate's, which run no hooks of their own."""
    import torch

    seen = optimizer
    while isinstance(getattr(seen, "optimizer", None), torch.optim.Optimizer):
        seen = seen.optimizer
    name = type(optimizer).__name__
    if not isinstance(seen, torch.optim.Optimizer) or not hasattr(seen, "_optimizer_step_pre_hooks"):
        raise TypeError(f"{name} is no torch optimizer with step hooks, so its steps cannot be followed or protected")
    if isinstance(seen, torch.optim.LBFGS):
        raise TypeError("LBFGS moves the parameters several times within one step; protection needs one move a step: use AdamW")
    if any(group.get("differentiable") for group in seen.param_groups):
        raise TypeError(f"{name} is differentiable: a move that is part of a graph cannot be projected in place")
    return seen


def _check_holds(optimizer: Optimizer, scope: Scope) -> None:
    """Every factor that trains must be one that this optimizer moves, or nothing here would protect it."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for site in scope.sites:
        for name in ("A", "B"):
            parameter = site.factor(name)
            if parameter.requires_grad and id(parameter) not in moved:
                raise ValueError(
                    f"factor {name} at {site.layer} trains but is not in this optimizer; "
                    "build the optimizer from the parameters of the model that runs, after all wrapping"
                )


def _note_first_call(held: Held, unasked: dict[int, Held]) -> None:
    ask = held.loss

    def loss(batch: Any, outputs: Any) -> Tensor | float:
        unasked.pop(id(held), None)
        return ask(batch, outputs)

    held.loss = loss  # type: ignore[method-assign]
