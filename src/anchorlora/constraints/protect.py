"""`protect`: constraints on any torch optimizer, through its step hooks, while a block runs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import ActiveConstraint, Constraint
from anchorlora.constraints.brake import KroneckerBrake
from anchorlora.constraints.checks import (
    reads_core,
    refuse_moved,
    refuse_nothing_free,
    refuse_replaced,
    refuse_stuck,
    refuse_unlike_processes,
    refuse_unsound,
    true_precision,
)
from anchorlora.constraints.displacement import ProjectDisplacement
from anchorlora.constraints.freeze import Freeze, Frozen
from anchorlora.constraints.gradient import ProjectGradient
from anchorlora.constraints.optimizers import (
    innermost,
    project_copies,
    refuse_misled_penalties,
    refuse_others_factors,
    refuse_unprotected,
)
from anchorlora.constraints.retract import Retract
from anchorlora.constraints.sensitivity import INPUTS
from anchorlora.constraints.watch import CHECK_EVERY, StepWatch
from anchorlora.devices import Uninterrupted, torch
from anchorlora.errors import InvalidType, InvalidValue, ProtectionLost

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from anchorlora.adapters import Anchor
    from anchorlora.geometry import LayerCore, Subspace


class Protection(list[ActiveConstraint]):
    """The active constraints of a `with protect(..)` block, in order."""

    watch: StepWatch
    beside: Protection | None = None  # of the full weights that train beside the adapter
    block: AbstractContextManager[Protection] | None = None  # that `create_protected_optimizer` has entered

    @property
    def step(self) -> int:
        """Number of optimizer steps of this task so far."""
        return self.watch.step

    def look(self, step: int | None = None) -> None:
        """Verify all constraints on the live parameters now, for example before a checkpoint is written.

        `protect` does the same every `check_every` steps.
        """
        self.watch.look(step)
        if self.beside is not None:
            self.beside.look(step)

    def close(self) -> None:
        """Verify a last time, raise what is lost, and release hooks and frozen factors, where no `with` block does."""
        if self.block is not None:
            block, self.block = self.block, None
            block.__exit__(None, None, None)


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
    """Enforce constraints at every step of a torch optimizer, in any training loop, while the block runs.

    Constraints act through the optimizer's step hooks, on penalties and gradients before a step and on the update after it.
    Autocast and lowered matmul precision do not affect them. When the block ends, also by an exception, an interrupted step is
    projected, the constraints are verified a last time, and hooks and frozen factors are released. After an exception, what that
    verification finds is added to it as a note.

    Args:
        optimizer: A torch optimizer that trains the anchor's factors, or a wrapper of one such as Accelerate's.
        anchor: The adapted layers, their start, and the directions to protect; see `Anchor.of`.
        constraints: Constraints, in the order in which they act. A `Trace` goes last.
        check_every: Optimizer steps between two verifications on the live parameters; there is one after the second step and one
            at the end as well.
        step: Optimizer steps already made in this task. Load their outcome inside the block: constraints begin from the start.
        also_training: Modules that train without protection, each by a run of its path such as "lm_head" or "model.norm". Any other
            parameter of the model that the optimizer trains is refused.

    Yields:
        The active constraints in order; the loop adds the `loss` of each to the task loss where there is one.

    Raises:
        InvalidType: The optimizer's steps cannot be followed, factors are not float32 or float64, or a constraint needs `loss` and
            the loop does not ask for it.
        InvalidValue: The optimizer or the model does not hold the factors, something else of a protected layer trains, the factors
            have moved since the anchor was made, a core is not orthonormal, or nothing can train: a frozen factor is zero, or all
            directions of all inputs are protected.
        NotFinite: Factors or cores hold NaN or infinite values.
        ProtectionLost: During a step or at the end: a constraint does not hold on the live parameters. The loop replaced the
            optimizer or the parameters, removed the hooks, lowered the factors' precision, wrote to the factors, or changed
            something else of a protected layer, such as its weight or its scale.

    Example:
        >>> from anchorlora import Anchor, Freeze, ProjectDisplacement, measure, protect
        >>> model, ids = tiny(), torch.arange(16)[None]
        >>> for p in model.parameters():
        ...     p.data += 0.02 * torch.randn_like(p) * p.requires_grad  # as after an earlier task
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        >>> with protect(optimizer, anchor, [Freeze("B"), ProjectDisplacement("A")]):
        ...     for _ in range(3):
        ...         model(input_ids=ids, labels=ids).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> measure(anchor).exact
        True
    """
    also_training = (also_training,) if isinstance(also_training, str) else tuple(also_training)
    constraints = as_constraints(constraints)
    inner = innermost(optimizer)
    flags = [(p, p.requires_grad) for layer in anchor.layers for p in map(layer.factor, layer.names)]
    refuse_others_factors(inner, anchor)
    refuse_replaced(anchor)
    with true_precision(anchor) as signals:
        signals.passing = True
        refuse_unsound(anchor, when=f"before step {step + 1}")
    refuse_unprotected(inner, anchor, also_training)
    refuse_nothing_free(anchor, {name for c in constraints for name in getattr(c, "closes", ())})
    _name_unprotected(anchor)
    active = Protection()
    hooks: list[Any] = []
    ends: list[Callable[[], None]] = []
    steps: _StepHooks | None = None
    try:  # the outer one, since a signal may come at the very line on which the inner one ends
        try:
            with true_precision(anchor) as signals:
                signals.passing = True  # what constraints prepare may take minutes
                refuse_unlike_processes(anchor)
                for constraint in constraints:
                    active.append(constraint.begin_task(anchor))
                refuse_stuck(inner, anchor, [c.factor for c in active if isinstance(c, Frozen)])
                refuse_moved(active)
                for c in active:
                    c.see(active)
                signals.passing = False
                ends += [layer.whole.hold() for layer in anchor.layers if layer.whole is not None]
            unasked = {id(c): c for c in active if type(c).loss is not ActiveConstraint.loss}
            for c in list(unasked.values()):
                _note_first_call(c, unasked)
            active.watch = StepWatch(inner, anchor, active, hooks, every=check_every, step=step, also_training=also_training)
            steps = _StepHooks(active, unasked, anchor)
            before, after = (torch.compiler.disable(hook) for hook in (steps.before, steps.after))  # a step may be compiled
            hooks += [inner.register_step_pre_hook(before), inner.register_step_post_hook(after)]
            with true_precision(anchor):
                for c in active:
                    c.begin(step)
            beside = _beside(inner, anchor, also_training, check_every=check_every, step=step)
            # no `try` here: at its line, no other one would be in force
            with _annotate_exceptions(steps, active), beside as active.beside:
                yield active
            active.beside = None
            steps.settle()
            active.look()
        finally:
            _release(steps, hooks, ends, active, flags)
    except KeyboardInterrupt:
        _release(steps, hooks, ends, active, flags)
        raise


def as_constraints(given: Constraint | Iterable[Constraint]) -> tuple[Constraint, ...]:
    """Return constraints that can be read more than once, of an iterator too, or of one alone."""
    constraints = (given,) if isinstance(given, Constraint) else tuple(given)
    if named := next((c.__name__ for c in constraints if isinstance(c, type)), None):
        raise InvalidType(f"{named} is a class and no constraint yet; give {named}(..)")
    return constraints


def constraints_for(anchor: Anchor) -> list[Constraint]:
    """Return constraints that protect an anchor: A of a new block goes off the core, B of an adapter that reads it is frozen."""
    if all(layer.names == ("W",) for layer in anchor.layers):
        return [ProjectDisplacement("W")]
    if any(bool(layer.rows("B").any()) and reads_core(layer) for layer in anchor.layers):
        return [Freeze("B"), ProjectGradient("A"), ProjectDisplacement("A")]
    brakes = [KroneckerBrake()] if any(name.startswith(f"{INPUTS}/") for name in anchor.past) else []
    return [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A"), *brakes]


def _name_unprotected(anchor: Anchor) -> None:
    """Warn of what trains without protection, even where somebody has allowed it."""
    training, tied = anchor.trains_beside(), anchor.beside.tied if anchor.beside is not None else ()
    named = [path for path in anchor.unprotected() if path in tied or any(f".{path}." in f".{name}." for name in training)]
    if named:
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        warnings.warn(f"nothing keeps what trains beside the protected layers: {', '.join(named[:3])}{more}", stacklevel=4)


def _beside(optimizer: Optimizer, anchor: Anchor, also_training: Collection[str], **how: int) -> AbstractContextManager[Any]:
    """Protect the full weights that train beside the adapter and have cores; all else is the outer block's to watch."""
    if anchor.beside is None or not anchor.beside.layers:
        return nullcontext()
    others = [*also_training, *anchor.beside.trains_beside()]
    return protect(optimizer, anchor.beside, [ProjectDisplacement("W")], also_training=others, **how)


def create_protected_optimizer(
    model: nn.Module,
    optimizer_cls: type[Optimizer],
    *,
    cores: Mapping[str, Subspace | LayerCore | Tensor],
    past: Mapping[str, Tensor] | None = None,
    constraints: Sequence[Constraint] | None = None,
    adapter_name: str | None = None,
    also_training: Collection[str] = (),
    **kwargs: Any,
) -> Optimizer:
    """Return an optimizer for a PEFT model whose steps leave protected directions alone, as PEFT's `create_*_optimizer` return one.

    For loops and trainers that take an optimizer and no `with` block. `optimizer.protection` is what `protect` yields; its
    `close()` verifies a last time. Until then the live parameters are verified as `protect` does.

    Args:
        model: A PeftModel, or what wraps one.
        optimizer_cls: Class of a torch optimizer, such as torch.optim.AdamW.
        cores: Protected subspaces by layer path in the base model: `Subspace`, or a tensor (d_in, k) with orthonormal columns.
        past: What `AnswerSensitivity` remembers of earlier tasks.
        constraints: Constraints in the order in which they act. By default those of the anchor at hand: an adapter that reads the
            core gets B frozen and A's displacement projected; a new block gets A off the core, A's displacement projected and, with
            a `past`, a `KroneckerBrake`.
        adapter_name: Adapter that trains; by default the active one.
        also_training: Modules that train without protection, as in `protect`.
        kwargs: Arguments of the optimizer, such as lr.

    Returns:
        The optimizer, over every parameter of the model that trains.

    Raises:
        InvalidType: As `protect` and `Anchor.of` raise it.
        InvalidValue: As `protect` and `Anchor.of` raise it; no cores are given, or nothing trains.
        UnknownName: As `Anchor.of` raises it.

    Example:
        >>> from anchorlora import measure
        >>> from anchorlora.constraints import create_protected_optimizer
        >>> model, ids = tiny(), torch.arange(16)[None]
        >>> optimizer = create_protected_optimizer(model, torch.optim.AdamW, cores=cores_of(model), lr=1e-3)
        >>> for _ in range(3):
        ...     model(input_ids=ids, labels=ids).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.protection.close()
        >>> measure(optimizer.protection.watch.anchor).exact
        True
    """
    from anchorlora.adapters import Anchor

    if not cores:
        raise InvalidValue("no cores are given, so nothing would be protected; anchorlora cores makes them of text")
    anchor = Anchor.of(model, cores=cores, past=past or {}, adapter_name=adapter_name)
    how = constraints_for(anchor) if constraints is None else constraints
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InvalidValue("nothing in this model trains; load the adapter with is_trainable=True")
    optimizer: Any = optimizer_cls(trained, **kwargs)
    block = protect(optimizer, anchor, how, also_training=also_training)
    optimizer.protection = block.__enter__()
    optimizer.protection.block = block
    return optimizer


def _release(
    steps: _StepHooks | None,
    hooks: Sequence[Any],
    ends: Sequence[Callable[[], None]],
    active: Protection,
    flags: Sequence[tuple[Tensor, bool]],
) -> None:
    """Give everything back, whatever signal comes."""
    with Uninterrupted():
        if steps is not None:  # an interrupt may have come while another one was answered
            with suppress(Exception):
                steps.settle()
        for hook in hooks:
            hook.remove()
        for end in ends:
            end()
        for c in active:
            c.release()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def _annotate_exceptions(steps: _StepHooks, active: Protection) -> Iterator[None]:
    """After an exception in the block, project what a step has moved, and add to it what a last verification finds."""
    try:
        yield
    except BaseException as error:
        active.beside = None
        try:
            steps.settle()
            if not isinstance(error, ProtectionLost):
                active.look()
        except Exception as lost:  # the loop's own exception is what is raised
            vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), str(lost)]  # Python 3.11 calls it error.add_note
        raise


class _StepHooks:
    """The two hooks of an optimizer's step.

    Where an optimizer calls the step of its base class, torch runs the hooks for both; the outer call is the step that is followed.
    """

    def __init__(self, active: Protection, unasked: dict[int, ActiveConstraint], anchor: Anchor) -> None:
        self.active, self.unasked, self.anchor = active, unasked, anchor
        self.gradients = 0  # how often gradients became final within the step under way
        self.skips = False  # whether the step under way is none: a fused optimizer finds out itself that a scaler has overflowed
        self.outermost: FrameType | None = None  # the call that step began with; one that failed never reaches `after`

    def before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Act before the step, or inside its closure where there is one, because that makes the gradients."""
        call = _step_frame()
        if self._is_inner(call):
            return None
        self.settle()
        overflowed = getattr(optimizer, "found_inf", None)
        self.skips = overflowed is not None and bool(overflowed)
        if self.skips:
            return None
        self.outermost = call
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._follow(kwargs["closure"], optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._follow(args[1], optimizer), *args[2:]), kwargs
        self._final(optimizer)
        return None

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        if self.skips or self._is_inner(_step_frame()):
            return
        watch, asked = self.active.watch, self.gradients
        if asked == 0:  # of the two hooks only this one may be left
            self.outermost = None
            watch.refuse_detached(watch.step + 1)
        if asked != 1:
            name = type(optimizer).__name__
            self.outermost = None
            raise InvalidType(f"{name} asked for gradients {asked} times in a step; protection needs one move a step: use AdamW")
        with true_precision(self.anchor):  # hooks run outside the optimizer's own no_grad
            for hook in (ActiveConstraint.after_raw_update, ActiveConstraint.after_optimizer_step):
                _each(self.active, hook)
            project_copies(optimizer, self.anchor, self.active)
            self.outermost, self.gradients = None, 0  # only now: until then the end of the block projects what has moved
            watch.count_step()

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
        self.active.watch.before_optimizer_step()
        with true_precision(self.anchor):
            for hook in (
                ActiveConstraint.after_backward,
                ActiveConstraint.add_penalty_grads,
                ActiveConstraint.before_optimizer_step,
            ):
                _each(self.active, hook)


def _step_frame() -> FrameType | None:
    """Return the call of the optimizer's step that runs a hook, without frames of torch.compile."""
    frame: FrameType | None = sys._getframe(2)
    while frame and (
        f"{os.sep}_dynamo{os.sep}" in frame.f_code.co_filename or frame.f_code.co_name.startswith("torch_dynamo_resume")
    ):
        frame = frame.f_back
    return frame


def _each(active: Sequence[ActiveConstraint], hook: Callable[[ActiveConstraint], None]) -> None:
    for c in active:
        getattr(c, hook.__name__)()


def _note_first_call(active: ActiveConstraint, unasked: dict[int, ActiveConstraint]) -> None:
    ask = active.loss

    def loss(batch: Any, outputs: Any) -> Tensor | float:
        unasked.pop(id(active), None)
        return ask(batch, outputs)

    active.loss = loss  # type: ignore[method-assign]
