"""A fresh block's start at the new task's inputs, outside the core   (InfLoRA, Liang and Li, CVPR 2024, arXiv 2404.00228).

    X  (n, d_in)  the layer's inputs over examples of the new task, before it is trained
    A_0 = the leading right singular directions of X P, as rows of norm 1 / sqrt(3)

Then A is frozen and B trains alone: `Freeze("A", first_task=1)`. With orthonormal rows, a step of SGD on B moves the weight as one
on the weight itself would, projected onto these directions, up to a factor. What differs from InfLoRA:

- V is our core, the one that every other method protects: chosen anew after each task, of limited size. InfLoRA's memory (DualGPM)
  takes new directions in after each task, by a threshold on energy that rises, and keeps the complement where that is smaller.
- The inputs are those of `examples` examples, all tokens; the official code reads the whole training set.
- The directions are those of X P, as in the paper. The official code decomposes P X^T X, whose directions are others where P and
  X^T X do not commute. The norm of the rows is the official code's: that of the rows of PEFT's uniform start.
- Any linear layer can be adapted; the official code adapts keys and values of a vision transformer. Classifier heads have no part
  here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import NEGLIGIBLE, core_of, refuse_learned, restart
from anchorlora.constraints.recording import inputs_read
from anchorlora.devices import float64_device, placed, torch

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor
    from anchorlora.geometry import GrowingRows, Subspace


@dataclass(frozen=True)
class InputStart(ProtectsPast):
    """Start a new block's A at the leading directions of the task's inputs, outside the core where there is one   (InfLoRA).

        A_0 = the leading right singular directions of X P, as rows of norm 1 / sqrt(3)

    It acts from the first task on. List it before `Retract("A")`, whose rounding is then the last, and `Freeze("A", first_task=1)`.
    Inputs of fewer directions than A has rows leave the other rows as they were drawn, without what they read of the core; a layer
    that no example reaches stays as it is.

    Args:
        examples: Examples of the new task whose inputs are read, all tokens of each.

    Example:
        >>> from anchorlora import Anchor, InputStart
        >>> model = tiny()
        >>> def losses(count):
        ...     for i in range(count):
        ...         ids = torch.arange(i, i + 8)[None]
        ...         yield model(input_ids=ids, labels=ids).loss
        >>> anchor = Anchor.of(model, cores=cores_of(model), losses=losses)
        >>> with torch.no_grad():
        ...     _ = InputStart(examples=2).begin_task(anchor)
        >>> A = anchor.layers[0].factor("A").detach()
        >>> bool((A @ anchor.layers[0].core.basis).norm() < 1e-6), bool((3 * A @ A.T - torch.eye(4)).norm() < 1e-5)
        (True, True)
    """

    examples: int = 64
    first_task = 1

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Move A of every layer, and its start with it.

        Args:
            anchor: The task's anchor, with `losses` of the new task.

        Returns:
            A constraint without hooks: there is nothing more to do.

        Raises:
            InvalidValue: B of a layer is not 0, so the function would change; or the anchor has no `losses`, or they give none.
            InvalidType: A factor is not stored in float32 or float64, or is split over processes (FSDP2).
        """
        refuse_learned(anchor, "InputStart")
        cores = {layer.name: core_of(layer) for layer in anchor.layers if layer.core is not None}
        whole: dict[str, float] = {}  # |X|^2, with what lies on the core

        def outside(name: str, x: Tensor) -> Tensor:
            whole[name] = whole.get(name, 0.0) + float(x.square().sum())
            return cores[name].outside(x) if name in cores else x

        read = inputs_read(anchor, self.examples, "InputStart", outside)
        for layer in anchor.layers:
            if layer.name in read:
                _design(layer, read.pop(layer.name), cores.get(layer.name), whole[layer.name])
        return ActiveConstraint()


def _design(layer: AdaptedLayer, read: GrowingRows, core: Subspace | None, whole: float) -> None:
    """Write the strongest directions of the rows into A, and what its other rows have outside the core."""
    A = layer.rows("A")
    start = placed(A, torch.float64, float64_device(A.device))
    strongest = start[:0]
    if read.total > 0.0:
        spectrum = read.spectrum(len(A))
        above = spectrum.shares * read.total > NEGLIGIBLE**2 * whole
        strongest = placed(spectrum.directions.T[above], start.dtype, start.device)
    rows = torch.cat([strongest, start[len(strongest) :]])
    if core is not None:
        rows = core.outside(rows)  # again: this is where digits are lost
    rows[: len(strongest)] /= 3**0.5 * rows[: len(strongest)].norm(dim=1, keepdim=True)
    restart(layer, rows)
