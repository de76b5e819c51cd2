"""Which optimizers can be protected: every stock torch optimizer that makes one update per step, on whole or row-split factors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import ActiveConstraint
from anchorlora.devices import torch
from anchorlora.errors import InvalidType, InvalidValue
from anchorlora.text import amount

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from anchorlora.adapters import Anchor


def innermost(optimizer: Any) -> Optimizer:
    """Return the torch optimizer that steps, below wrappers such as Accelerate's, which run no hooks of their own."""
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
    """Refuse factors that train in another optimizer: nothing here would protect them."""
    moved = moved_by(optimizer)
    for layer in anchor.layers:
        for name in layer.names:
            parameter = layer.factor(name)
            if parameter.requires_grad and id(parameter) not in moved:
                how = "build the optimizer from the parameters of the model that runs, after all wrapping"
                if any(id(layer.factor(name)) in moved for layer in anchor.layers for name in layer.names):
                    how = "one optimizer must hold all factors, in parameter groups where settings differ"
                raise InvalidValue(f"factor {name} at {layer.name} trains but is not in this optimizer; {how}")


def refuse_unprotected(optimizer: Optimizer, anchor: Anchor, also_training: Collection[str]) -> None:
    """Refuse parameters that train beside the protected factors, unless their modules were named outside the protected layers."""
    for layer in anchor.layers:
        name = layer.whole.trains() if layer.whole is not None else None
        if name:
            raise InvalidValue(
                f"{name} at {layer.name} trains beside the protected factors, and no constraint covers it; freeze it"
            )
    if changed := anchor.changed():
        raise InvalidValue(f"{changed[0]} since its anchor was made; make the Anchor when the model is as it will be trained")
    if others := unprotected(optimizer, anchor, also_training):
        more = f" and {amount(len(others) - 1, 'more parameter')} train" if len(others) > 1 else " trains"
        how = ", which takes an optimizer of pairs of names and parameters" if others[0].startswith(UNNAMED) else ""
        raise InvalidValue(
            f"{others[0]}{more} beside the protected layers, and nothing keeps what they were; freeze them, or name their modules "
            f"in also_training{how}"
        )
    if anchor.layers and not any(layer.factor(name).requires_grad for layer in anchor.layers for name in layer.names):
        raise InvalidValue("nothing can train: all factors are frozen; load the adapter with is_trainable=True")


UNNAMED = "a parameter of shape "


def unprotected(optimizer: Optimizer, anchor: Anchor, also_training: Collection[str]) -> list[str]:
    """Return the names of parameters that train in any optimizer, neither protected nor declared. A parameter of this optimizer
    outside the anchor's model is named by its shape, unless the optimizer knows its name.
    """
    from anchorlora.adapters.guard import idle_tensors

    moved, model = moved_by(optimizer), anchor.model
    idle = idle_tensors(model) - moved if model is not None else set()
    beside = [name for name, parameter in anchor.trains_beside().items() if id(parameter) not in idle]
    known = {id(layer.factor(name)) for layer in anchor.layers for name in layer.names}
    known |= {id(layer.gated.gates.values) for layer in anchor.layers if layer.gated}
    known |= {id(p) for p in model.parameters()} if model is not None else set()
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"{UNNAMED}{tuple(p.shape)} outside the anchor's model" for p in group["params"]]
        beside += [name for name, p in zip(names, group["params"], strict=False) if p.requires_grad and id(p) not in known]
    return [name for name in beside if not declared(name, also_training)]


def declared(parameter: str, modules: Collection[str]) -> bool:
    """Return True if a parameter is part of one of the modules."""
    return any(f".{module}." in f".{parameter}." for module in modules)


COPIES = ("z", "x", "y")  # of the factors: all schedule-free optimizers hold z, their reference implementations the others too


def project_copies(optimizer: Any, anchor: Anchor, active: Sequence[ActiveConstraint]) -> None:
    """Project the copies a schedule-free optimizer trains and evaluates at: averages, so dA V = 0 holds if it does in each."""
    if not keeps_copies(optimizer):
        return
    parameters = [layer.factor(name) for layer in anchor.layers for name in layer.names]
    for name in COPIES:
        pairs = []
        for parameter in parameters:
            copy = optimizer.state.get(parameter, {}).get(name)
            if getattr(copy, "shape", None) == parameter.shape:
                pairs.append((parameter.detach(), copy))
            elif name == "z" and parameter.requires_grad and parameter.grad is not None:
                raise InvalidType(
                    f"{type(optimizer).__name__} keeps the weights it averages in a place that is not known; use AdamW"
                )
        if pairs:
            _exchange(pairs)
            for constraint in active:
                constraint.project()
            _exchange(pairs)


def keeps_copies(optimizer: Any) -> bool:
    """Return True if the optimizer has modes of its own for training and evaluation, with different weights."""
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def _exchange(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def holds_factors(optimizer: Any, anchor: Anchor) -> bool:
    """Return True if this optimizer, or the one it wraps, trains any factor of the anchor."""
    moved = moved_by(innermost(optimizer))
    return any(id(layer.factor(name)) in moved for layer in anchor.layers for name in layer.names)


def moved_by(optimizer: Optimizer) -> set[int]:
    """Return the identities of all parameters that an optimizer trains."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def refuse_misled_penalties(optimizer: Optimizer, active: Sequence[ActiveConstraint]) -> None:
    """Refuse penalties where their gradient would act otherwise: unscaled in a fused step under a scaler, or maximized."""
    scaled = getattr(optimizer, "grad_scale", None) is not None
    if not scaled and not any(group.get("maximize") for group in optimizer.param_groups):
        return
    from anchorlora.constraints.base import Penalty

    if adding := [type(c).__name__.strip("_") for c in active if isinstance(c, Penalty)]:
        raise InvalidType(
            f"{adding[0]} adds a gradient, but a fused optimizer under a gradient scaler unscales inside its step; "
            "use fused=False, or train in bfloat16 or float32 without a scaler"
            if scaled
            else f"{adding[0]} adds a gradient to be minimized, but the optimizer maximizes; negate the loss, without maximize"
        )


def _refuse_partitions(optimizer: Any) -> None:
    if any(cls.__module__.startswith("deepspeed.") for cls in type(optimizer).__mro__):
        raise InvalidType(
            f"{type(optimizer).__name__} of DeepSpeed keeps the factors in flat partitions of its own and would overwrite what "
            "a projection writes; use DDP or FSDP2 (fully_shard)"
        )
