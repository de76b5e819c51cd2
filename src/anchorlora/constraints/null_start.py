"""A fresh block's start where earlier tasks read least   (after LoRA-Null, Tang et al., AAAI 2026, arXiv 2503.02659).

    X  (n, d_in)  the layer's inputs over examples of all finished tasks      r  rank of A
    A_0 = r orthogonal rows of norm 1 / sqrt(3), on the r right singular directions of X that are weakest

Then both factors train, so nothing is exact: a start is no constraint. What differs from LoRA-Null:

- B starts at 0 and the weight stays whole. LoRA-Null starts at the part of W that reads these directions, which it takes out of W;
  its official code has our start as another option.
- The inputs are those of the tasks that were learned before, of a model that has learned them. LoRA-Null reads general questions
  once, to keep what pre-training has taught; so the first task has nothing to keep here and starts as any other block.
- LoRA-Null also freezes A. Then it is `lora-fa-retract`, up to which rows outside the strongest directions A has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import NEGLIGIBLE, refuse_learned, restart
from anchorlora.constraints.recording import inputs_read
from anchorlora.devices import float64_device, placed, torch
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor

NULL = "null/"  # what begins the names of what `NullStart` remembers


@dataclass(frozen=True)
class NullStart(ProtectsPast):
    """Start a new block's A at the directions that the inputs of finished tasks use least   (after LoRA-Null).

        A_0 = r orthogonal rows of norm 1 / sqrt(3), on the r right singular directions of X that are weakest

    It acts from the second task on and promises nothing: A moves on from there. It remembers the inputs of finished tasks as their
    256 strongest directions a layer; where an input is wider, A_0 is drawn in the complement of these, as the block's start.

    Args:
        examples: Examples of a finished task whose inputs are read, all tokens of each.

    Example:
        >>> from anchorlora import Anchor, NullStart
        >>> model = tiny()
        >>> def losses(count):
        ...     for i in range(count):
        ...         ids = torch.arange(i, i + 8)[None]
        ...         yield model(input_ids=ids, labels=ids).loss
        >>> past = NullStart(examples=2).end_task(Anchor.of(model, losses=losses))
        >>> anchor = Anchor.of(model, past=past)
        >>> with torch.no_grad():
        ...     _ = NullStart().begin_task(anchor)
        >>> layer = anchor.layers[0]
        >>> A, strongest = layer.factor("A").detach(), past[f"null/{layer.name}"][:4]
        >>> bool((A @ strongest.T).norm() < 1e-5 * strongest.norm()), bool((3 * A @ A.T - torch.eye(4)).norm() < 1e-5)
        (True, True)
    """

    examples: int = 64
    reads = NULL
    requires = ()

    @property
    def needs(self) -> str:
        """Text."""
        return f"one pass over {self.examples} examples of each finished task: text is enough"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Move A of every layer, and its start with it.

        Args:
            anchor: The task's anchor, with what `end_task` returned in its `past`.

        Returns:
            A constraint without hooks: there is nothing more to do.

        Raises:
            InvalidValue: B of a layer is not 0, so the function would change; or nothing is remembered of its inputs.
            InvalidType: A factor is not stored in float32 or float64, or is split over processes (FSDP2).
        """
        refuse_learned(anchor, "NullStart")
        for layer in anchor.layers:
            _write_unused(layer, anchor.past.get(NULL + layer.name))
        return ActiveConstraint()

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return the inputs of all finished tasks as directions times their singular values.

        Args:
            anchor: The finished task's anchor, with `losses`.

        Returns:
            "null/<layer>" (m, d_in), strongest first, float32, on the CPU; m is at most 256.

        Raises:
            InvalidValue: The anchor has no `losses`, or they give no example.
        """
        from anchorlora.geometry import KEPT

        read = inputs_read(anchor, self.examples, "NullStart", lambda _, x: x)
        kept = {name: t for name, t in anchor.past.items() if name.startswith(NULL)}  # also of layers that were not reached
        for name, rows in read.items():
            if NULL + name in kept:
                rows.add(kept[NULL + name])
            if rows.total > 0.0:
                spectrum = rows.spectrum(KEPT)
                sizes = (spectrum.shares.clamp(min=0) * rows.total).sqrt()
                kept[NULL + name] = (sizes * spectrum.directions).T.float().cpu().contiguous()
        return kept


def _write_unused(layer: AdaptedLayer, inputs: Tensor | None) -> None:
    """Write rows into A that the remembered inputs use least."""
    from anchorlora.geometry import Subspace

    A = layer.rows("A")
    rank, d = A.shape
    if inputs is None or inputs.ndim != 2 or inputs.shape[1] != d:
        raise InvalidValue(
            f"NullStart knows no inputs of width {d} at {layer.name}: pass what its end_task() returned as past= to Anchor.of"
        )
    start = placed(A, torch.float64, float64_device(A.device))
    _, sizes, right = torch.linalg.svd(placed(inputs, start.dtype, start.device), full_matrices=False)
    known = int((sizes > NEGLIGIBLE * sizes[0]).sum()) if len(sizes) else 0
    strong = Subspace(right[: min(known, max(d - rank, 0))].T.contiguous())
    rows = strong.outside(torch.linalg.qr(strong.outside(start).T).Q.T)  # twice: this is where digits are lost
    restart(layer, rows / (3**0.5 * rows.norm(dim=1, keepdim=True)))
