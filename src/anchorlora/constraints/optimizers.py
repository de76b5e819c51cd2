"""Which optimizers can be followed: every stock torch optimizer that makes one move a step on whole or row-split factors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import ActiveConstraint
from anchorlora.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from anchorlora.adapters import Anchor


def innermost(optimizer: Any) -> Optimizer:
    """The torch optimizer that really steps, below wrappers such as Accelerate's, which run no hooks of their own."""
    import torch

    seen = optimizer
    while True:
        _refuse_partitions(seen)
        if not isinstance(getattr(seen, "optimizer", None), torch.optim.Optimizer):
            break
        seen = seen.optimizer
    name = type(optimizer).__name__
    if not isinstance(seen, torch.optim.Optimizer) or not hasattr(seen, "_optimizer_step_pre_hooks"):
        raise InvalidType(f"{name} is no torch optimizer with step hooks, so its steps cannot be followed or protected")
    if isinstance(seen, torch.optim.LBFGS):
        raise InvalidType("LBFGS moves the parameters several times within one step; protection needs one move a step: use AdamW")
    if keeps_copies(seen) and not any("schedulefree" in cls.__name__.lower() for cls in type(seen).__mro__):
        raise InvalidType(f"{name} has a mode of its own for serving, with weights that no projection reaches; use AdamW")
    if any(group.get("differentiable") for group in seen.param_groups):
        raise InvalidType(f"{name} is differentiable: a move that is part of a graph cannot be projected in place")
    return seen


def refuse_others_factors(optimizer: Optimizer, anchor: Anchor) -> None:
    """Every factor that trains must be one that this optimizer moves, or nothing here would protect it."""
    moved = moved_by(optimizer)
    for layer in anchor.layers:
        for name in ("A", "B"):
            parameter = layer.factor(name)
            if parameter.requires_grad and id(parameter) not in moved:
                raise InvalidValue(
                    f"factor {name} at {layer.name} trains but is not in this optimizer; "
                    "build the optimizer from the parameters of the model that runs, after all wrapping"
                )


def refuse_unprotected(optimizer: Optimizer, anchor: Anchor, also_training: Collection[str]) -> None:
    """Whatever of the model trains beside the protected factors must have been named, and none of it is in a protected layer."""
    for layer in anchor.layers:
        name = layer.whole.trains() if layer.whole is not None else None
        if name:
            raise InvalidValue(
                f"{name} at {layer.name} trains beside the protected factors, and no constraint covers it; freeze it"
            )
    changed = anchor.changed()
    if changed:
        raise InvalidValue(f"{changed[0]} since its anchor was made; make the Anchor when the model is as it will be trained")
    others = unprotected(optimizer, anchor, also_training)
    if others:
        more = f" and {len(others) - 1} more parameters train" if len(others) > 1 else " trains"
        raise InvalidValue(
            f"{others[0]}{more} beside the protected layers, and nothing keeps what they were; freeze them, or name their modules "
            "in also_training"
        )


def unprotected(optimizer: Optimizer, anchor: Anchor, also_training: Collection[str]) -> list[str]:
    """The names of the model's parameters that this optimizer moves although they are neither protected nor declared."""
    moved = moved_by(optimizer)
    beside = [name for name, parameter in anchor.trains_beside().items() if id(parameter) in moved]
    return [name for name in beside if not _declared(name, also_training)]


def _declared(parameter: str, modules: Collection[str]) -> bool:
    """Whether a parameter is part of one of the modules, each named by a run of its path, such as "lm_head" or "model.norm"."""
    return any(f".{module}." in f".{parameter}." for module in modules)


def project_copies(optimizer: Any, anchor: Anchor, held: Sequence[ActiveConstraint]) -> None:
    """Project what a schedule-free optimizer keeps of the factors, z, which it mixes into them when it changes to eval mode.

    It trains at y and serves x, both averages of points that are projected: as they all keep dA V = 0, so does every average.
    """
    if not keeps_copies(optimizer):
        return
    pairs = []
    for layer in anchor.layers:
        for name in ("A", "B"):
            parameter = layer.factor(name)
            copy = optimizer.state.get(parameter, {}).get("z")
            if copy is not None:
                pairs.append((parameter.detach(), copy))
            elif parameter.requires_grad and parameter.grad is not None:
                raise InvalidType(
                    f"{type(optimizer).__name__} keeps the weights it averages in a place that is not known; use AdamW"
                )
    _exchange(pairs)
    for h in held:
        h.project()
    _exchange(pairs)


def keeps_copies(optimizer: Any) -> bool:
    """Whether the parameters are not what this optimizer will leave: it has a mode to train in and one to serve in."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def holds_factors(optimizer: Any, anchor: Anchor) -> bool:
    """Whether this optimizer, or the one it wraps, moves any factor of the scope."""
    moved = moved_by(innermost(optimizer))
    return any(id(layer.factor(name)) in moved for layer in anchor.layers for name in ("A", "B"))


def moved_by(optimizer: Optimizer) -> set[int]:
    """The identities of all parameters that an optimizer moves."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def refuse_scaled_penalties(optimizer: Optimizer, held: Sequence[ActiveConstraint]) -> None:
    """A fused optimizer gets its gradients still multiplied by the gradient scaler; a penalty's gradient is not."""
    if getattr(optimizer, "grad_scale", None) is None:
        return
    from anchorlora.constraints.base import Penalty

    adding = [type(h).__name__.strip("_") for h in held if isinstance(h, Penalty)]
    if adding:
        raise InvalidType(
            f"{adding[0]} adds a gradient, but a fused optimizer under a gradient scaler unscales inside its step; "
            "use fused=False, or train in bfloat16 or float32 without a scaler"
        )


def _refuse_partitions(optimizer: Any) -> None:
    if any(cls.__module__.startswith("deepspeed.") for cls in type(optimizer).__mro__):
        raise InvalidType(
            f"{type(optimizer).__name__} of DeepSpeed keeps the factors in flat partitions of its own and would overwrite what "
            "a projection writes; use DDP or FSDP2 (fully_shard)"
        )
