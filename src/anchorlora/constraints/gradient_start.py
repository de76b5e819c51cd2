"""A fresh block's start at the new task's first gradient, outside the core.

    D = sum_examples d loss / d W  (d_out, d_in), the gradient by the layer's effective weight      P = I - V V^T
    A_0 = the leading right singular directions of D P, as rows, with the norm that A had
    V: the core; with principal = p, and the right singular directions that hold the share p of |W|^2, W the frozen weight

B stays 0, so no output changes, and A_0 V = 0. PEFT's uniform start spends most of A on directions that the task never reads.
(LoRA-GA, Wang et al. 2024, takes both factors from the gradient; here B must be 0 and A must not read the core.)

With `principal` the start stays off the leading right singular directions of the frozen weight too, as many as hold that share of
its squared singular values. Then A is frozen and B trains alone: KeepLoRA (Luo et al., ICLR 2026, arXiv 2601.19659). What differs:

- V is our core, chosen anew after each task and limited in size. KeepLoRA's basis begins with the weight's directions and grows
  by a threshold on what is left of each task's features.
- D is the sum over `examples` examples; the official code reads the whole training set.
- Rows have the norm of PEFT's uniform start, about 1 / sqrt(3); the official code's have norm 1. The share 0.6 is that of its
  language model (0.85 and 0.2 for the two sides of CLIP), where it takes one direction fewer than reach the share.
- What A reads of the weight's directions is 0, so dW is too. The outputs are free: `ProjectSingular` keeps both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import refuse_learned, restart
from anchorlora.constraints.recording import losses_summed, record_examples, refuse_none
from anchorlora.devices import forked_generators, in_float64, placed, torch
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor
    from anchorlora.geometry import Subspace

OVERSAMPLED, ITERATIONS = 8, 6  # of the randomized SVD (Halko, Martinsson and Tropp 2011)


@dataclass(frozen=True)
class GradientStart(ProtectsPast):
    """Start a new block's A at the leading directions of the task's first gradient, outside the core where there is one.

    List it before `Retract("A")`, whose rounding is then the last. For a moment it holds one gradient of the size of each adapted
    weight, in float32 on the CPU.

    Args:
        examples: Examples of the new task whose gradients are added up.
        first_task: The first task, counted from 1, whose block it starts.
        principal: Share of each frozen weight's squared singular values; A starts off the right singular directions that hold it
            (KeepLoRA). At a task's start this costs min(d_out, d_in)^3 per layer; 0 leaves the weights out.

    Raises:
        InvalidValue: The share is below 0 or not below 1.

    Example:
        >>> from anchorlora import Anchor
        >>> from anchorlora.constraints import GradientStart
        >>> model = tiny()
        >>> def losses(count):
        ...     for i in range(count):
        ...         ids = torch.arange(i, i + 8)[None]
        ...         yield model(input_ids=ids, labels=ids).loss
        >>> anchor = Anchor.of(model, cores=cores_of(model), losses=losses)
        >>> before = anchor.layers[0].factor("A").detach().clone()
        >>> with torch.no_grad():
        ...     _ = GradientStart(examples=2).begin_task(anchor)
        >>> A = anchor.layers[0].factor("A")
        >>> bool((A @ anchor.layers[0].core.basis).norm() < 1e-6), bool((A.norm() - before.norm()).abs() < 1e-5)
        (True, True)
    """

    examples: int = 64
    first_task: int = field(default=2, kw_only=True)
    principal: float = field(default=0.0, kw_only=True)
    requires = ()

    def __post_init__(self) -> None:
        if not 0 <= self.principal < 1:
            raise InvalidValue(f"GradientStart(principal=..) is a share, from 0 to below 1, not {self.principal}; 0 leaves it out")

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Move A of every layer, and its start with it.

        Args:
            anchor: The task's anchor, with `losses` of the new task.

        Returns:
            A constraint without hooks: there is nothing more to do.

        Raises:
            InvalidValue: B of a layer is not 0, so the function would change; or the anchor has no `losses`, or they give none;
                or a weight is unknown, or its directions and the core leave nothing to train.
            InvalidType: A factor is not stored in float32 or float64, or is split over processes (FSDP2), or a layer runs outside
                the graph (reentrant activation checkpointing).
        """
        refuse_learned(anchor, "GradientStart")
        toward: dict[str, Tensor] = {}
        with record_examples(anchor, "GradientStart") as seen, torch.enable_grad():
            for loss in losses_summed(anchor, self.examples):
                for name, (x, g) in seen.rows(None, loss).items():
                    added = (g.float().T @ x.float()).cpu()  # autocast is off, and a start needs no more digits
                    toward[name] = toward[name].add_(added) if name in toward else added
        refuse_none("GradientStart", toward)
        for layer in anchor.layers:
            _start(layer, toward.pop(layer.name, None), self.principal)
        return ActiveConstraint()


def _directions_to_avoid(layer: AdaptedLayer, principal: float) -> Subspace | None:
    """Return the core joined with the right singular directions that hold that share of the weight, in float64 on the CPU."""
    from anchorlora.geometry import Subspace

    core = None if layer.core is None else layer.core.to(dtype=torch.float64, device="cpu")
    if not principal:
        return core
    _, sizes, right = torch.linalg.svd(in_float64(layer.base_weight()), full_matrices=False)
    held = sizes.square().cumsum(0)
    off = Subspace(right[: int((held < principal * held[-1]).sum()) + 1].T.contiguous().cpu())
    off = off if core is None else core.joined(off)
    if off.k >= off.d:
        raise InvalidValue(
            f"the core at {layer.name} and the directions with {principal:g} of its weight leave A nothing to read; "
            "use a smaller share (--set GradientStart.principal=..) or a smaller core"
        )
    return off


def _start(layer: AdaptedLayer, gradient: Tensor | None, principal: float) -> None:
    """Write the leading right singular directions of the gradient into A, outside of what the start stays off."""
    A, off = layer.rows("A"), _directions_to_avoid(layer, principal)
    if gradient is not None:
        gradient = in_float64(gradient)
        gradient = gradient if off is None else off.outside(gradient)
    rank = len(A)
    q = 0 if gradient is None else min(2 * rank + OVERSAMPLED, *gradient.shape)
    size = placed(A, torch.float64, torch.device("cpu"))
    if gradient is None or q < rank or not bool(gradient.any()):  # fewer directions than rows, or the task does not use the layer
        if not principal:
            return  # as it was drawn
        directions = size
    else:
        with forked_generators():
            torch.manual_seed(0)
            directions = in_float64(torch.svd_lowrank(gradient.float(), q=q, niter=ITERATIONS)[2][:, :rank].T)
    if off is not None:
        directions = off.outside(directions)  # again: this is where digits are lost
    restart(layer, directions / directions.norm() * size.norm())
