"""Keep an adapter's update off the leading singular directions of the frozen weights   (OPLoRA, AAAI 2026, arXiv 2510.13003).

    W = U S V^T  (d_out, d_in)  frozen weight      U_k (d_out, k), V_k (d_in, k)  its leading singular directions
    dW = s P_L B A P_R      P_L = I - U_k U_k^T      P_R = I - V_k V_k^T      neither is formed

Then (W + dW) V_k = U_k S_k and U_k^T (W + dW) = S_k V_k^T: the k leading singular triples of every weight stay as they are. This
needs no feature of old data, so it acts from the first task on.

OPLoRA trains free factors and projects their product. Here the factors themselves stay in the complements, B <- P_L B and
A <- A P_R, their gradients are projected before the step and they are projected after it. The functions that can be learned are
the same, and so is the path of SGD, with or without momentum, of Adam and of AdamW, in exact arithmetic: a gradient that flows back
through P_R is the projected one, the optimizer's state sees no other, and P_R is linear in what the optimizer adds and in what
weight decay takes away. Two things differ. An optimizer that reads the size of a factor, such as Adafactor or LAMB, sees that of
the projected one. A loop that clips gradients clips them before they are projected, so the norm that it compares has the part on
U_k and V_k in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import exact_factor, off_core, on_core, refuse_split, restart
from anchorlora.constraints.freeze import Frozen
from anchorlora.constraints.stacks import Stack, outside, stacks_of
from anchorlora.devices import float64_device, in_float64
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor
    from anchorlora.geometry import Subspace


@dataclass(frozen=True)
class ProjectSingular(ProtectsPast):
    """Keep both factors off the k leading singular directions of the layer's frozen weight   (OPLoRA).

        dW = s P_L B A P_R,  so dW V_k = 0 and U_k^T dW = 0

    It needs the weights and no data, and acts from the first task on, on a new block or on one that it has kept so far. A weight
    that is held in 4 or 8 bits is decomposed as the layer computes with it. At a task's start this costs min(d_out, d_in)^3 per
    layer. It shares its factors with no other projection of parameters, since two of them do not commute.

    Args:
        k: Singular directions to preserve, per side and layer; smaller than d_in and d_out.

    Example:
        >>> from anchorlora import Anchor, ProjectSingular, protect
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> anchor = Anchor.of(model)
        >>> optimizer = torch.optim.AdamW(trained)
        >>> with protect(optimizer, anchor, [ProjectSingular(4)]):
        ...     for _ in range(2):
        ...         for p in trained:
        ...             p.grad = torch.randn_like(p)  # loss.backward() in a real loop
        ...         optimizer.step()
        >>> layer = anchor.layers[0]
        >>> change, strongest = layer.current.B @ layer.current.A, torch.linalg.svd(layer.base_weight()).Vh[:4]
        >>> bool((change @ strongest.T).norm() < 1e-6 < change.norm())
        True
    """

    k: int = 16
    first_task = 1
    requires = ()
    closes = ("singular",)

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Decompose the weights, and move the start of new blocks into the complement.

        Args:
            anchor: The task's anchor, of a model.

        Raises:
            InvalidValue: A block is trained already and lies on the directions, a weight is unknown or has no k of them, or k
                leaves nothing to train.
            InvalidType: A factor is not stored in float32 or float64, or is split over processes (FSDP2).
        """
        return _OffSingular(anchor, self.k)


class _OffSingular(ActiveConstraint):
    def __init__(self, anchor: Anchor, k: int) -> None:
        self.targets: list[tuple[AdaptedLayer, dict[str, Subspace]]] = []
        for layer in anchor.layers:
            for name in ("A", "B"):
                exact_factor(layer, name)
            refuse_split(layer, ("A", "B"), "its columns cannot be projected row by row")
            self.targets.append((layer, directions_of(layer, k)))
        for layer, off in self.targets:
            _enter(layer, off)
        off_of = {layer.name: off for layer, off in self.targets}
        self.stacks: list[tuple[Stack, dict[str, Tensor]]] = []
        for stack in stacks_of(anchor.layers, "A", "B"):
            A = stack.bases(lambda layer: off_of[layer.name]["A"].basis)
            self.stacks.append((stack, {"A": A, "B": stack.bases(lambda layer: off_of[layer.name]["B"].basis)}))

    def see(self, active: Sequence[ActiveConstraint]) -> None:
        for other in active:
            if other is not self and type(other).project is not ActiveConstraint.project and not isinstance(other, Frozen):
                raise InvalidValue(
                    "ProjectSingular keeps A and B off singular directions, and another constraint projects them too; "
                    "the two projections do not commute: leave one of them out"
                )

    def before_optimizer_step(self) -> None:
        for layer, off in self.targets:
            for name in ("A", "B"):
                if (gradient := layer.gradient_rows(name)) is not None:
                    gradient.copy_(_off(gradient, off[name], name))

    def project(self) -> None:
        for name in ("A", "B"):
            if not any(layer.factor(name).requires_grad for layer, _ in self.targets):
                continue  # frozen means bitwise
            for stack, bases in self.stacks:
                factor = in_float64(stack.factor(name))
                stack.write(name, outside(factor, bases[name]) if name == "A" else outside(factor.mT, bases[name]).mT)

    def violation(self) -> str | None:
        return next((sentence for layer, off in self.targets if (sentence := _violation_at(layer, off))), None)


def directions_of(layer: AdaptedLayer, k: int) -> dict[str, Subspace]:
    """Return the directions that each factor of a layer must stay off: V_k for A and U_k for B, in float64."""
    from anchorlora.geometry import singular_directions

    weight = layer.base_weight()
    if k >= min(weight.shape):
        raise InvalidValue(
            f"the weight of {layer.name} is {tuple(weight.shape)}, so {k} singular directions leave nothing to train; "
            f"use fewer than {min(weight.shape)} (--set ProjectSingular.k=..)"
        )
    try:
        left, right = singular_directions(weight, k)
    except InvalidValue as error:
        raise InvalidValue(f"{layer.name}: {error}") from None
    home = float64_device(layer.factor("A").device)
    return {"A": right.to(device=home), "B": left.to(device=home)}


def _enter(layer: AdaptedLayer, off: dict[str, Subspace]) -> None:
    """Move a new block's A, with its start; leave a block that lies off the directions as it is."""
    A = layer.rows("A")
    if not bool(layer.factor("B").any()):
        restart(layer, _off(A, off["A"], "A"))
    elif sentence := _violation_at(layer, off):
        raise InvalidValue(
            f"{sentence}: this block was trained without ProjectSingular, and moving it now would change the function; "
            "open a new block for it, as PerTask() does"
        )


def _off(factor: Tensor, directions: Subspace, name: str) -> Tensor:
    """A P_R, or P_L B, in float64."""
    wide = in_float64(factor)
    return directions.outside(wide) if name == "A" else directions.outside(wide.T).T


def _violation_at(layer: AdaptedLayer, off: dict[str, Subspace]) -> str | None:
    for name, what in (("A", "|A V_k|"), ("B", "|U_k^T B|")):
        factor = in_float64(layer.rows(name))
        norm, bound = off_core(factor if name == "A" else factor.T, off[name], size=factor)
        if not norm <= bound:
            return on_core(what, layer, norm, bound)
    return None
