"""`protect`: constraints on any torch optimizer, through its step hooks, while a block runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from anchorlora.constraints.base import ActiveConstraint, Constraint, begin_task
from anchorlora.constraints.checks import (
    name_open,
    refuse_moved,
    refuse_nothing_free,
    refuse_replaced,
    refuse_stuck,
    refuse_unlike_processes,
    refuse_unsound,
    true_precision,
)
from anchorlora.constraints.displacement import ProjectDisplacement, ProjectStep
from anchorlora.constraints.freeze import Frozen
from anchorlora.constraints.gradient import ProjectGradient
from anchorlora.constraints.optimizers import (
    innermost,
    refuse_others_factors,
    refuse_unprotected,
)
from anchorlora.constraints.steps import PROTECTED, StepHooks, note_first_call
from anchorlora.constraints.watch import CHECK_EVERY, StepWatch
from anchorlora.devices import Uninterrupted, torch
from anchorlora.errors import InvalidType, InvalidValue, ProtectionLost

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from anchorlora.adapters import Anchor


class Protection(list[ActiveConstraint]):
    """The active constraints of a `with protect(..)` block, in order."""

    watch: StepWatch
    hooks: StepHooks
    beside: Protection | None = None  # of the full weights that train beside the adapter
    block: AbstractContextManager[Protection] | None = None  # that `create_protected_optimizer` has entered

    @property
    def step(self) -> int:
        """Number of optimizer steps of this task so far."""
        return self.watch.step

    def look(self, step: int | None = None) -> None:
        """Project what a failed step may have moved, and verify all constraints on the live parameters now, for example before a
        checkpoint; `protect` verifies every `check_every` steps.
        """
        if not self.watch.has_lost_hooks():
            self.hooks.settle_failed()
        self.watch.look(step)
        if self.beside is not None:
            self.beside.look(step)

    def close(self) -> None:
        """Verify a last time, raise what is lost, and release hooks and frozen factors, where no `with` block does."""
        if self.block is not None:
            block, self.block = self.block, None
            block.__exit__(None, None, None)


def protect(
    optimizer: Optimizer,
    anchor: Anchor,
    constraints: Constraint | Iterable[Constraint],
    *,
    check_every: int = CHECK_EVERY,
    step: int = 0,
    also_training: Collection[str] = (),
) -> AbstractContextManager[Protection]:
    """Enforce constraints at every step of a torch optimizer, in any training loop, while the block runs.

    Constraints act through the optimizer's step hooks, on penalties and gradients before a step and on the update after it.
    Autocast and lowered matmul precision do not affect them. When the block ends, also by an exception, an interrupted step is
    projected, the constraints are verified a last time, and hooks and frozen factors are released. After an exception, what that
    verification finds is added to it as a note.

    Args:
        optimizer: A torch optimizer that trains the anchor's factors, or a wrapper of one such as Accelerate's.
        anchor: The adapted layers, their start, and the directions to protect; see `Anchor.of`.
        constraints: One constraint, or several in the order in which they act. A `Trace` goes last.
        check_every: Optimizer steps between two verifications on the live parameters; there is one after the second step and one
            at the end as well.
        step: Optimizer steps already made in this task. Load their outcome inside the block: constraints begin from the start.
        also_training: Modules that train without protection, each by a run of its path such as "lm_head" or "model.norm". Any other
            parameter of the model that the optimizer trains is refused.

    Yields:
        The active constraints in order; the loop adds the `loss` of each to the task loss where there is one.

    Raises:
        InvalidType: The optimizer's steps cannot be followed, factors are not float32 or float64, something else is given for
            a constraint, or a constraint needs `loss` and the loop does not ask for it.
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
    chosen = as_constraints(constraints)
    if isinstance(anchor, torch.nn.Module) or not hasattr(anchor, "layers"):
        raise InvalidType(f"anchor is a {type(anchor).__name__}; give Anchor.of(model, cores=cores)")
    inner, closed = innermost(optimizer), _closed(chosen)
    plain = type(inner) is torch.optim.SGD and not any(group["weight_decay"] for group in inner.param_groups)
    firsts = {layer.names[0] for layer in anchor.layers}  # A, or W of full weights
    projected = {type(constraint) for constraint in chosen if getattr(constraint, "factor", None) in firsts}
    if {ProjectDisplacement, ProjectStep} & projected or (plain and ProjectGradient in projected):  # but for roundings that add up
        closed |= {"displacement"}
    name_open(anchor, closed, projects=ProjectGradient in projected)
    inner.register_step_pre_hook(_refuse_unentered)  # until the block begins
    return enforcing(optimizer, anchor, chosen, check_every=check_every, step=step, also_training=also_training)


def _closed(constraints: Iterable[Constraint]) -> set[str]:
    return {name for constraint in constraints for name in getattr(constraint, "closes", ())}


def _refuse_unentered(*_: Any) -> None:
    raise InvalidValue(
        "protect(..) was called for this optimizer and its block was never entered, so nothing is protected; write "
        "`with protect(..):` around the loop"
    )


@contextmanager
def enforcing(
    optimizer: Optimizer,
    anchor: Anchor,
    chosen: Sequence[Constraint],
    *,
    check_every: int = CHECK_EVERY,
    step: int = 0,
    also_training: Collection[str] = (),
) -> Iterator[Protection]:
    # what `protect` does, without a word about what the constraints leave open: a method says that itself
    from torch.optim.optimizer import register_optimizer_step_post_hook

    inner = innermost(optimizer)
    before_steps = inner._optimizer_step_pre_hooks
    for key in [key for key, hook in before_steps.items() if hook is _refuse_unentered]:
        del before_steps[key]
    also_training = (also_training,) if isinstance(also_training, str) else tuple(also_training)
    flags = [(p, p.requires_grad) for layer in anchor.layers for p in map(layer.factor, layer.names)]
    refuse_others_factors(inner, anchor)
    refuse_replaced(anchor)
    with true_precision(anchor) as signals:
        signals.passing = True
        refuse_unsound(anchor, when=f"before step {step + 1}")
    refuse_unprotected(inner, anchor, also_training)
    refuse_nothing_free(anchor, _closed(chosen))
    _name_unprotected(anchor)
    active = Protection()
    hooks: list[Any] = []
    ends: list[Callable[[], None]] = []
    steps: StepHooks | None = None
    try:  # the outer one, since a signal may come at the very line on which the inner one ends
        try:
            with true_precision(anchor) as signals:
                signals.passing = True  # what constraints prepare may take minutes
                refuse_unlike_processes(anchor)
                for constraint in chosen:
                    active.append(begin_task(constraint, anchor))
                refuse_stuck(inner, anchor, [c.factor for c in active if isinstance(c, Frozen)])
                refuse_moved(active)
                for c in active:
                    c.see(active)
                signals.passing = False
                ends += [layer.whole.hold() for layer in anchor.layers if layer.whole is not None]
            unasked = {id(c): c for c in active if type(c).loss is not ActiveConstraint.loss}
            for c in list(unasked.values()):
                note_first_call(c, unasked)
            active.watch = StepWatch(inner, anchor, active, hooks, every=check_every, step=step, also_training=also_training)
            steps = active.hooks = StepHooks(active, active.watch, unasked, anchor)
            before, after = (torch.compiler.disable(hook) for hook in (steps.before, steps.after))  # a step may be compiled
            hooks += [inner.register_step_pre_hook(before), inner.register_step_post_hook(after)]
            seen = WeakMethod(steps.after_other)  # a block that nobody closes ends when its optimizer is no longer used
            look_at = torch.compiler.disable(lambda *args: (look := seen()) and look(*args))
            trained = {id(parameter) for _, parameter in active.watch.trained}

            def watch_others(other: Optimizer, *args: Any) -> None:  # traced, so that another model's step compiles with fullgraph
                if any(id(parameter) in trained for group in other.param_groups for parameter in group["params"]):
                    look_at(other, *args)

            hooks += [register_optimizer_step_post_hook(watch_others)]
            PROTECTED.add(inner)
            with true_precision(anchor):
                for c in active:
                    c.begin(step)
            beside = _beside(inner, anchor, also_training, check_every=check_every, step=step)
            # no `try` here: at its line, no other one would be in force
            with _annotate_exceptions(steps, active), beside as active.beside:
                yield active
            active.beside = None
            active.look()
        finally:
            _release(steps, hooks, ends, active, flags)
    except KeyboardInterrupt:
        _release(steps, hooks, ends, active, flags)
        raise


def as_constraints(given: Constraint | Iterable[Constraint]) -> tuple[Constraint, ...]:
    """Return constraints that can be read more than once, of an iterator too, or of one alone."""
    constraints = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    if named := next((c.__name__ for c in constraints if isinstance(c, type)), None):
        raise InvalidType(f"{named} is a class and no constraint yet; give {named}(..)")
    if other := next((type(c).__name__ for c in constraints if not hasattr(c, "begin_task")), None):
        raise InvalidType(f"a {other} is no constraint; give a list of constraints, those of a method as method.constraints")
    return constraints


def _name_unprotected(anchor: Anchor) -> None:
    """Warn of what trains without protection, even where somebody has allowed it."""
    training, tied = anchor.trains_beside(), anchor.beside.tied if anchor.beside is not None else ()
    named = [path for path in anchor.unprotected() if path in tied or any(f".{path}." in f".{name}." for name in training)]
    if named:
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        warnings.warn(f"nothing keeps what trains beside the protected layers: {', '.join(named[:3])}{more}", stacklevel=4)


def _beside(optimizer: Optimizer, anchor: Anchor, also_training: Collection[str], **how: int) -> AbstractContextManager[Any]:
    """Protect the full weights that train beside the adapter and have cores; the outer block watches everything else."""
    if anchor.beside is None or not anchor.beside.layers:
        return nullcontext()
    others = [*also_training, *anchor.beside.trains_beside()]
    return protect(optimizer, anchor.beside, [ProjectDisplacement("W")], also_training=others, **how)


def _release(
    steps: StepHooks | None,
    hooks: Sequence[Any],
    ends: Sequence[Callable[[], None]],
    active: Protection,
    flags: Sequence[tuple[Tensor, bool]],
) -> None:
    """Release everything, whatever signal comes."""
    with Uninterrupted():
        if steps is not None:  # an interrupt may have come while another one was answered
            with suppress(Exception):
                steps.settle()
            PROTECTED.discard(steps.watch.optimizer)
        for hook in hooks:
            hook.remove()
        for end in ends:
            end()
        for c in active:
            c.release()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def _annotate_exceptions(steps: StepHooks, active: Protection) -> Iterator[None]:
    """After an exception in the block, project what a step has moved, and add what a last verification finds to it."""
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
