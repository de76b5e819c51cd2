"""`protect`: constraints on any torch optimizer, through its step hooks, for as long as a block runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import ActiveConstraint, Constraint
from anchorlora.constraints.checks import refuse_moved, refuse_replaced, refuse_unlike_processes, refuse_unsound, true_precision
from anchorlora.constraints.optimizers import (
    innermost,
    project_copies,
    refuse_others_factors,
    refuse_scaled_penalties,
    refuse_unprotected,
)
from anchorlora.constraints.watch import CHECK_EVERY, Watch
from anchorlora.errors import InvalidType, ProtectionLost

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from anchorlora.adapters import Anchor


class Protection(list[ActiveConstraint]):
    """The working memory of the constraints that hold, in order, and a look at their promises for whoever wants one in between."""

    watch: Watch

    @property
    def step(self) -> int:
        """Optimizer steps that were followed, of this task."""
        return self.watch.step

    def look(self, step: int | None = None) -> None:
        """What `protect` does every `check_every` steps, now, as before a checkpoint is written.

        step: optimizer steps by the loop's own count. Raises ProtectionLost and NotFinite.
        """
        self.watch.look(step)


@contextmanager
def protect(
    optimizer: Optimizer,
    anchor: Anchor,
    constraints: Sequence[Constraint],
    *,
    check_every: int = CHECK_EVERY,
    step: int = 0,
    also_training: Collection[str] = (),
) -> Iterator[Protection]:
    """Hold `constraints` on `anchor` while the block runs, around any loop that calls `optimizer.step()`.

    Yields their working memory, in order. When the block ends, also by an exception, a step that was interrupted is projected, the
    promises are looked at once more, and hooks and frozen factors are taken back; what that look finds is added to an exception as
    a note. Autocast and lowered matmul precision do not reach into it.

    step           optimizer steps of this task made before; their outcome is loaded inside the block, once the start is feasible
    check_every    optimizer steps between two looks at the live parameters; there is one after the second step and one at the end
    also_training  names, or ends of names, of modules that train without protection, such as "lm_head"; any other parameter of the
                   model that trains beside the protected factors is refused

    Raises TypeError for an optimizer whose steps cannot be followed, ValueError when it or the model does not hold the factors,
    when something else of a protected layer trains or the factors are no longer those of the anchor, or when a core is no
    orthonormal basis, NotFinite for factors and cores that hold NaN, and ProtectionLost, during a step or at the end, when a
    promise does not hold on the live parameters: because the loop replaced the optimizer or the parameters, took the hooks off,
    lowered the factors' precision or wrote to them itself, or changed something else of a protected layer, such as its weight or
    its scale.
    """
    inner = innermost(optimizer)
    flags = [(p, p.requires_grad) for layer in anchor.layers for p in (layer.factor("A"), layer.factor("B"))]
    refuse_others_factors(inner, anchor)
    refuse_unprotected(inner, anchor, also_training)
    refuse_replaced(anchor)
    held = Protection()
    hooks: list[Any] = []
    try:
        with true_precision(anchor):
            refuse_unsound(anchor, when=f"before step {step + 1}")
            refuse_unlike_processes(anchor)
            for constraint in constraints:
                held.append(constraint.begin_task(anchor))
            refuse_moved(held)
            for h in held:
                h.see(held)
        unasked = {id(h): h for h in held if type(h).loss is not ActiveConstraint.loss}
        for h in list(unasked.values()):
            _note_first_call(h, unasked)
        held.watch = Watch(inner, anchor, held, hooks, every=check_every, step=step, also_training=also_training)
        moments = _Moments(held, unasked, anchor)
        hooks += [inner.register_step_pre_hook(moments.before), inner.register_step_post_hook(moments.after)]
        with true_precision(anchor):
            for h in held:
                h.begin(step)
        try:
            yield held
        except BaseException as error:
            _note_what_is_left(error, moments, held)
            raise
        moments.settle()
        held.look()
    finally:
        for hook in hooks:
            hook.remove()
        for h in held:
            h.release()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _note_what_is_left(error: BaseException, moments: _Moments, held: Protection) -> None:
    """Project what an interrupted step has moved, and look a last time: the model is left as protected as it can be."""
    try:
        moments.settle()
        if not isinstance(error, ProtectionLost):
            held.look()
    except Exception as found:  # the loop's own exception is what is raised
        error.add_note(str(found))


class _Moments:
    """What the two hooks of an optimizer do at each step.

    Where an optimizer calls the step of its base class, torch runs the hooks for both: the outer call is the step that is followed.
    """

    def __init__(self, held: Protection, unasked: dict[int, ActiveConstraint], anchor: Anchor) -> None:
        self.held, self.unasked, self.anchor = held, unasked, anchor
        self.gradients = 0  # how often gradients became final within the step under way
        self.outermost: FrameType | None = None  # the call that step began with; one that failed never reaches `after`

    def before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Before the step; a closure makes the gradients inside it, so it is followed there."""
        call = sys._getframe(1)
        if self._is_inner(call):
            return None
        self.settle()
        self.outermost = call
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._followed(kwargs["closure"], optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._followed(args[1], optimizer), *args[2:]), kwargs
        self._final(optimizer)
        return None

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_inner(sys._getframe(1)):
            return
        watch, asked = self.held.watch, self.gradients
        self.outermost, self.gradients = None, 0
        if asked == 0:  # of the two hooks only this one may be left
            watch.refuse_detached(watch.step + 1)
        if asked != 1:
            name = type(optimizer).__name__
            raise InvalidType(f"{name} asked for gradients {asked} times in a step; protection needs one move a step: use AdamW")
        with true_precision(self.anchor):  # hooks run outside the optimizer's own no_grad
            for moment in (ActiveConstraint.after_raw_update, ActiveConstraint.after_optimizer_step):
                _each(self.held, moment)
            project_copies(optimizer, self.anchor, self.held)
            watch.stepped()

    def settle(self) -> None:
        """A step that failed may have moved some factors: project them.  It does not count as a step."""
        failed, self.outermost, self.gradients = self.gradients > 0, None, 0
        if failed:
            with true_precision(self.anchor):
                for h in self.held:
                    h.project()

    def _followed(self, closure: Callable[[], Tensor], optimizer: Optimizer) -> Callable[[], Tensor]:
        def call() -> Tensor:
            loss = closure()
            self._final(optimizer)
            return loss

        return call

    def _is_inner(self, call: FrameType) -> bool:
        """Whether the step that `call` runs is part of one that is still under way: one of its callers."""
        caller = call.f_back if self.outermost else None
        while caller is not None and caller is not self.outermost:
            caller = caller.f_back
        return caller is not None

    def _final(self, optimizer: Optimizer) -> None:
        self.gradients += 1
        if self.unasked:
            names = ", ".join(type(h).__name__.strip("_") for h in self.unasked.values())
            raise InvalidType(
                f"{names} adds to the loss, but this loop never asks for it: add h.loss(batch, outputs) of every held"
            )
        refuse_scaled_penalties(optimizer, self.held)
        self.held.watch.before_optimizer_step()
        with true_precision(self.anchor):
            for moment in (
                ActiveConstraint.after_backward,
                ActiveConstraint.add_penalty_grads,
                ActiveConstraint.before_optimizer_step,
            ):
                _each(self.held, moment)


def _each(held: Sequence[ActiveConstraint], moment: Callable[[ActiveConstraint], None]) -> None:
    for h in held:
        getattr(h, moment.__name__)()


def _note_first_call(held: ActiveConstraint, unasked: dict[int, ActiveConstraint]) -> None:
    ask = held.loss

    def loss(batch: Any, outputs: Any) -> Tensor | float:
        unasked.pop(id(held), None)
        return ask(batch, outputs)

    held.loss = loss  # type: ignore[method-assign]
