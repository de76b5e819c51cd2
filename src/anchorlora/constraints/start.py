"""A fresh block's start: A_0 from the new task's first gradient or inputs, outside the core, or where earlier tasks read least.

`GradientStart`

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

`InputStart`   (InfLoRA, Liang and Li, CVPR 2024, arXiv 2404.00228)

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

`NullStart`   (after LoRA-Null, Tang et al., AAAI 2026, arXiv 2503.02659)

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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor
from anchorlora.constraints.recording import losses_together, recorded
from anchorlora.devices import float64_device, forked_generators, in_float64, placed
from anchorlora.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor
    from anchorlora.geometry import GrowingRows, Subspace

NULL = "null/"  # what begins the names of what `NullStart` remembers
NOTHING_LEFT = 1e-6  # of |X|: a direction of X P that is weaker is rounding
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
            InvalidType: A factor is not stored in float32 or float64, or is split over processes (FSDP2).
        """
        import torch

        _refuse_learned(anchor, "GradientStart")
        toward: dict[str, Tensor] = {}
        with recorded(anchor, "GradientStart") as seen, torch.enable_grad():
            for losses in losses_together(anchor, self.examples):
                for name, (x, g) in seen.rows(None, losses.sum()).items():
                    added = (g.T @ x).float().cpu()
                    toward[name] = toward[name].add_(added) if name in toward else added
        if not toward:
            raise InvalidValue("GradientStart got no example of the new task: losses of the anchor gave none")
        for layer in anchor.layers:
            _start(layer, toward.pop(layer.name, None), self.principal)
        return ActiveConstraint()


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
        import torch

        from anchorlora.geometry import GrowingRows

        _refuse_learned(anchor, "InputStart")
        cores = {layer.name: core_of(layer) for layer in anchor.layers if layer.core is not None}
        read: dict[str, GrowingRows] = {}
        whole: dict[str, float] = {}  # |X|^2, with what lies on the core
        with recorded(anchor, "InputStart") as seen, torch.no_grad():
            for _ in anchor.losses(self.examples):  # type: ignore[misc]  # `recorded` refuses None
                for name, x in seen.inputs().items():
                    outside = cores[name].outside(x) if name in cores else x
                    read.setdefault(name, GrowingRows(device=x.device)).add(outside.float().cpu())
                    whole[name] = whole.get(name, 0.0) + float(x.square().sum())
        if not read:
            raise InvalidValue("InputStart got no example of the new task: losses of the anchor gave none")
        for layer in anchor.layers:
            if layer.name in read:
                _design(layer, read.pop(layer.name), cores.get(layer.name), whole[layer.name])
        return ActiveConstraint()


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
        _refuse_learned(anchor, "NullStart")
        for layer in anchor.layers:
            _unused(layer, anchor.past.get(NULL + layer.name))
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
        import torch

        from anchorlora.geometry import KEPT, GrowingRows

        read: dict[str, GrowingRows] = {}
        with recorded(anchor, "NullStart") as seen, torch.no_grad():
            for _ in anchor.losses(self.examples):  # type: ignore[misc]  # `recorded` refuses None
                for name, x in seen.inputs().items():
                    read.setdefault(name, GrowingRows(device=x.device)).add(x.float().cpu())
        if not read:
            raise InvalidValue("NullStart got no example of the finished task: losses of the anchor gave none")
        kept = {name: t for name, t in anchor.past.items() if name.startswith(NULL)}  # also of layers that were not reached
        for name, rows in read.items():
            if NULL + name in kept:
                rows.add(kept[NULL + name])
            if rows.total > 0.0:
                spectrum = rows.spectrum(KEPT)
                energy = spectrum.energy[: spectrum.directions.shape[1]]
                sizes = (torch.diff(energy, prepend=energy.new_zeros(1)).clamp(min=0) * rows.total).sqrt()
                kept[NULL + name] = (sizes * spectrum.directions).T.float().cpu().contiguous()
        return kept


def _refuse_learned(anchor: Anchor, who: str) -> None:
    """Raise where A cannot be moved, or not without changing the function."""
    for layer in anchor.layers:
        exact_factor(layer, "A")
        if layer.is_split("A"):
            raise InvalidType(
                f"A at {layer.name} is split over processes, and its rows cannot be started one process at a time; "
                "keep LoRA factors whole (ignored_params of fully_shard)"
            )
        if bool(layer.factor("B").any()):
            raise InvalidValue(f"{who} would change the function at {layer.name}: B is not zero there; start a new block with it")


def _kept_off(layer: AdaptedLayer, principal: float) -> Subspace | None:
    """What a start stays off, in float64 on the CPU: the core, and the right singular directions with that share of the weight."""
    import torch

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


def _unused(layer: AdaptedLayer, inputs: Tensor | None) -> None:
    """Write rows into A that the remembered inputs use least."""
    import torch

    from anchorlora.geometry import Subspace

    A = layer.rows("A")
    rank, d = A.shape
    if inputs is None or inputs.ndim != 2 or inputs.shape[1] != d:
        raise InvalidValue(
            f"NullStart knows no inputs of width {d} at {layer.name}: pass what its end_task() returned as past= to Anchor.of"
        )
    start = placed(A, torch.float64, float64_device(A.device))
    _, sizes, right = torch.linalg.svd(placed(inputs, start.dtype, start.device), full_matrices=False)
    known = int((sizes > NOTHING_LEFT * sizes[0]).sum()) if len(sizes) else 0
    strong = Subspace(right[: min(known, max(d - rank, 0))].T.contiguous())
    rows = strong.outside(torch.linalg.qr(strong.outside(start).T).Q.T)  # twice: this is where digits are lost
    A.copy_(placed(rows / (3**0.5 * rows.norm(dim=1, keepdim=True)), A.dtype, A.device))
    layer.start_rows("A").copy_(A)


def _design(layer: AdaptedLayer, read: GrowingRows, core: Subspace | None, whole: float) -> None:
    """Write the strongest directions of the rows into A, and what its other rows have outside the core."""
    import torch

    A = layer.rows("A")
    start = placed(A, torch.float64, float64_device(A.device))
    found = start[:0]
    if read.total > 0.0:
        spectrum = read.spectrum(len(A))
        energy = spectrum.energy[: spectrum.directions.shape[1]]
        strong = torch.diff(energy, prepend=energy.new_zeros(1)) * read.total > NOTHING_LEFT**2 * whole
        found = placed(spectrum.directions.T[strong], start.dtype, start.device)
    rows = torch.cat([found, start[len(found) :]])
    if core is not None:
        rows = core.outside(rows)  # again: this is where digits are lost
    rows[: len(found)] /= 3**0.5 * rows[: len(found)].norm(dim=1, keepdim=True)
    A.copy_(placed(rows, A.dtype, A.device))
    layer.start_rows("A").copy_(A)


def _start(layer: AdaptedLayer, gradient: Tensor | None, principal: float) -> None:
    import torch

    A, off = layer.rows("A"), _kept_off(layer, principal)
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
            directions = torch.svd_lowrank(gradient, q=q, niter=ITERATIONS)[2][:, :rank].T
    if off is not None:
        directions = off.outside(directions)  # again: this is where digits are lost
    A.copy_(placed(directions / directions.norm() * size.norm(), A.dtype, A.device))
    layer.start_rows("A").copy_(A)
