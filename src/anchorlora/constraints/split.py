"""Keep a learned anchor's response with a B that trains: B moves only where A_0 does not carry the core.

    dB A_0 V = 0      Q  (r, q)  left singular directions of A_0 V that are not zero      dB <- dB - dB Q Q^T

With (A - A_0) V = 0 the response s (B A - B_0 A_0) V = s dB A_0 V vanishes. It leaves r - q of the rank to B, so it needs a core of
fewer directions than the adapter has rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor, off_core, on_core, refuse_split
from anchorlora.devices import in_float64, torch
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from anchorlora.adapters import Anchor

ZERO = 1e-6  # of the largest singular value: what float32 storage of A_0 leaves


@dataclass(frozen=True)
class RankSplit(ProtectsPast):
    """Let B of a learned anchor move only where A does not carry the core: dB A_0 V = 0, after every step.

    With `ProjectDisplacement("A")` beside it the response on the core does not change, and B trains in the rest of the rank.

    Example:
        >>> from anchorlora import Anchor, ProjectDisplacement, measure, protect
        >>> from anchorlora.constraints import RankSplit
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> for p in trained:
        ...     p.data += 0.02 * torch.randn_like(p)  # as after an earlier task
        >>> anchor = Anchor.of(model, cores=cores_of(model, k=2))
        >>> optimizer = torch.optim.AdamW(trained)
        >>> with protect(optimizer, anchor, [ProjectDisplacement("A"), RankSplit()]):
        ...     for p in trained:
        ...         p.grad = torch.randn_like(p)  # loss.backward() in a real loop
        ...     optimizer.step()
        >>> measure(anchor).exact
        True
    """

    closes = ("delta_b_term",)

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Find where A carries the core.

        Args:
            anchor: The task's anchor, with cores.

        Raises:
            InvalidValue: A layer has no core, or one that leaves B nothing to move in.
            InvalidType: A factor is not stored in float32 or float64, or is split over processes (FSDP2).
        """
        return _Splitting(anchor)


class _Splitting(ActiveConstraint):
    def __init__(self, anchor: Anchor) -> None:
        from anchorlora.geometry import Subspace

        self.targets = []
        for layer in anchor.layers:
            exact_factor(layer, "B")
            refuse_split(layer, ("A", "B"), "B cannot be projected row by row of A")
            carried = core_of(layer).coordinates(in_float64(layer.start_factor("A")))
            U, S, _ = torch.linalg.svd(carried)
            taken = int((ZERO * S[0] < S).sum()) if bool(S[0] > 0) else 0
            if taken == len(U):
                raise InvalidValue(
                    f"the core at {layer.name} takes the whole rank {len(U)}, so B could not move; "
                    "use fewer directions (SensitiveCore.at_most), a larger rank, or Freeze('B')"
                )
            if taken:
                self.targets.append((layer, Subspace(U[:, :taken].contiguous())))

    def project(self) -> None:
        for layer, taken in self.targets:
            B, start = layer.rows("B"), in_float64(layer.start_rows("B"))
            B.copy_(start + taken.outside(in_float64(B) - start))

    def violation(self) -> str | None:
        for layer, taken in self.targets:
            B, start = in_float64(layer.rows("B")), in_float64(layer.start_rows("B"))
            moved, bound = off_core(B - start, taken, size=B)
            if not moved <= bound:
                return on_core("|dB A_0 V|", layer, moved, bound)
        return None
