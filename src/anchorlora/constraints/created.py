"""`create_protected_optimizer`, and the constraints that an anchor gets where none are given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import Constraint
from anchorlora.constraints.brake import KroneckerBrake
from anchorlora.constraints.checks import reads_core
from anchorlora.constraints.displacement import ProjectDisplacement
from anchorlora.constraints.freeze import Freeze
from anchorlora.constraints.gradient import ProjectGradient
from anchorlora.constraints.protect import protect
from anchorlora.constraints.retract import Retract
from anchorlora.constraints.sensitivity import knows
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from anchorlora.adapters import Anchor
    from anchorlora.geometry import LayerCore, Subspace


def constraints_for(anchor: Anchor) -> list[Constraint]:
    """Return constraints that protect an anchor: they move A of a new block off V, or freeze B of an adapter that reads V."""
    if all(layer.names == ("W",) for layer in anchor.layers):
        return [ProjectDisplacement("W")]
    if any(bool(layer.rows("B").any()) and reads_core(layer) for layer in anchor.layers):
        return [Freeze("B"), ProjectGradient("A"), ProjectDisplacement("A")]
    brakes = [KroneckerBrake()] if knows(anchor.past) else []
    return [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A"), *brakes]


def create_protected_optimizer(
    model: nn.Module,
    optimizer_cls: type[Optimizer],
    *,
    cores: Mapping[str, Subspace | LayerCore | Tensor],
    past: Mapping[str, Tensor] | None = None,
    constraints: Constraint | Iterable[Constraint] | None = None,
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
