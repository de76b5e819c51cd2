"""Which optimizers can be followed: every stock torch optimizer that makes one move a step on whole or row-split factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import Held

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from anchorlora.adapters import Scope


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
        raise TypeError(f"{name} is no torch optimizer with step hooks, so its steps cannot be followed or protected")
    if isinstance(seen, torch.optim.LBFGS):
        raise TypeError("LBFGS moves the parameters several times within one step; protection needs one move a step: use AdamW")
    if any(group.get("differentiable") for group in seen.param_groups):
        raise TypeError(f"{name} is differentiable: a move that is part of a graph cannot be projected in place")
    return seen


def refuse_others_factors(optimizer: Optimizer, scope: Scope) -> None:
    """Every factor that trains must be one that this optimizer moves, or nothing here would protect it."""
    moved = moved_by(optimizer)
    for site in scope.sites:
        for name in ("A", "B"):
            parameter = site.factor(name)
            if parameter.requires_grad and id(parameter) not in moved:
                raise ValueError(
                    f"factor {name} at {site.layer} trains but is not in this optimizer; "
                    "build the optimizer from the parameters of the model that runs, after all wrapping"
                )


def holds_factors(optimizer: Any, scope: Scope) -> bool:
    """Whether this optimizer, or the one it wraps, moves any factor of the scope."""
    moved = moved_by(innermost(optimizer))
    return any(id(site.factor(name)) in moved for site in scope.sites for name in ("A", "B"))


def moved_by(optimizer: Optimizer) -> set[int]:
    """The identities of all parameters that an optimizer moves."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def refuse_scaled_penalties(optimizer: Optimizer, held: Sequence[Held]) -> None:
    """A fused optimizer gets its gradients still multiplied by the gradient scaler; a penalty's gradient is not."""
    if getattr(optimizer, "grad_scale", None) is None:
        return
    from anchorlora.constraints.penalty import Penalty

    adding = [type(h).__name__.strip("_") for h in held if isinstance(h, Penalty)]
    if adding:
        raise TypeError(
            f"{adding[0]} adds a gradient, but a fused optimizer under a gradient scaler unscales inside its step; "
            "use fused=False, or train in bfloat16 or float32 without a scaler"
        )


def _refuse_partitions(optimizer: Any) -> None:
    if any(cls.__module__.startswith("deepspeed.") for cls in type(optimizer).__mro__):
        raise TypeError(
            f"{type(optimizer).__name__} of DeepSpeed keeps the factors in flat partitions of its own and would overwrite what "
            "a projection writes; use DDP or FSDP2 (fully_shard)"
        )
