"""The hooks of an optimizer's step, through which `protect` lets constraints act."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from anchorlora.constraints.base import ActiveConstraint
from anchorlora.constraints.checks import true_precision
from anchorlora.constraints.optimizers import project_copies, refuse_misled_penalties
from anchorlora.devices import torch
from anchorlora.errors import InvalidType

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from anchorlora.adapters import Anchor
    from anchorlora.constraints.watch import StepWatch


PROTECTED: WeakSet[Optimizer] = WeakSet()  # the optimizers whose blocks are open


class StepHooks:
    """Act before and after a step; if it calls its base class's step, torch runs the hooks for both, and only the outer counts."""

    def __init__(
        self, active: Sequence[ActiveConstraint], watch: StepWatch, unasked: dict[int, ActiveConstraint], anchor: Anchor
    ) -> None:
        self.active, self.watch, self.unasked, self.anchor = active, watch, unasked, anchor
        self.gradients = 0  # how often gradients became final within the step under way
        self.skips = False  # whether the step under way is none: a fused optimizer finds out itself that a scaler has overflowed
        self.outermost: FrameType | None = None  # the call that step began with; one that failed never reaches `after`

    def before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Act before the step, or inside its closure if it has one, since that computes the gradients."""
        call = _step_frame()
        if self._is_inner(call):
            return None
        self.settle()
        overflowed = getattr(optimizer, "found_inf", None)
        self.skips = overflowed is not None and bool(overflowed)
        if self.skips:
            return None
        if torch._C._current_graph_task_id() != -1:  # a projection would write to what that backward pass still needs
            raise InvalidType(
                f"{type(optimizer).__name__} steps within the backward pass; protection needs one step after it: switch off what "
                "releases gradients early"
            )
        self.outermost = call
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._follow(kwargs["closure"], optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._follow(args[1], optimizer), *args[2:]), kwargs
        self._final(optimizer)
        return None

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Act after the step, on what it has moved, and count it."""
        if self.skips or self._is_inner(_step_frame()):
            return
        asked = self.gradients
        if asked == 0:  # of the two hooks only this one may be left
            self.outermost = None
            self.watch.refuse_detached(self.watch.step + 1)
        if asked != 1:
            name = type(optimizer).__name__
            self.outermost = None
            raise InvalidType(f"{name} asked for gradients {asked} times in a step; protection needs one move a step: use AdamW")
        with true_precision(self.anchor):  # hooks run outside the optimizer's own no_grad
            self._call("after_raw_update", "after_optimizer_step")
            project_copies(optimizer, self.anchor, self.active)
            self.outermost, self.gradients = None, 0  # only now: until then the end of the block projects what has moved
            self.watch.count_step()

    def after_other(self, optimizer: Optimizer, *_: Any) -> None:
        # Verify after a step of another optimizer of the factors, unless it is part of the protected one's or protected itself.
        if optimizer is not self.watch.optimizer and optimizer not in PROTECTED and not self._is_inner(_step_frame()):
            self.watch.look_after(optimizer)

    def settle_failed(self) -> None:
        """Settle, unless a step is under way, as in its closure."""
        if not self._is_inner(sys._getframe()):
            self.settle()

    def settle(self) -> None:
        """Project what a failed step may have moved; it does not count as a step."""
        if self.gradients > 0:
            with true_precision(self.anchor):
                for c in self.active:
                    c.project()
                self.gradients = 0
        self.outermost = None

    def _follow(self, closure: Callable[[], Tensor], optimizer: Optimizer) -> Callable[[], Tensor]:
        def call() -> Tensor:
            loss = closure()
            self._final(optimizer)
            return loss

        return call

    def _is_inner(self, call: FrameType | None) -> bool:
        """Return True if the step that `call` runs is part of one that is still under way: one of its callers."""
        caller = call.f_back if call and self.outermost else None
        while caller is not None and caller is not self.outermost:
            caller = caller.f_back
        return caller is not None

    def _final(self, optimizer: Optimizer) -> None:
        self.gradients += 1
        if self.unasked:
            names = ", ".join(type(c).__name__.strip("_") for c in self.unasked.values())
            raise InvalidType(
                f"{names} adds to the loss, but this loop never asks for it: "
                "add c.loss(batch, outputs) of every c that protect() yields"
            )
        refuse_misled_penalties(optimizer, self.active)
        self.watch.before_optimizer_step()
        with true_precision(self.anchor):
            self._call("after_backward", "add_penalty_grads", "before_optimizer_step")

    def _call(self, *hooks: str) -> None:
        """Call each hook for all constraints before the next one."""
        for hook in hooks:
            for c in self.active:
                getattr(c, hook)()


def _step_frame() -> FrameType | None:
    """Return the call of the optimizer's step that runs a hook, without frames of torch.compile."""
    frame: FrameType | None = sys._getframe(2)
    while frame and (
        f"{os.sep}_dynamo{os.sep}" in frame.f_code.co_filename or frame.f_code.co_name.startswith("torch_dynamo_resume")
    ):
        frame = frame.f_back
    return frame


def note_first_call(active: ActiveConstraint, unasked: dict[int, ActiveConstraint]) -> None:
    """Take a constraint off the unasked ones as soon as the loop asks for its loss."""
    ask = active.loss

    def loss(batch: Any, outputs: Any) -> Tensor | float:
        unasked.pop(id(active), None)
        return ask(batch, outputs)

    active.loss = loss  # type: ignore[method-assign]
