"""Part of the last task's change: the update becomes s_0 B_0 A_0 + c (s B A - s_0 B_0 A_0), but for one rounding of the factors.

    A_0, B_0, s_0  adapter before the last task, nothing for a first one      A, B, s  after it      c  the scale that is asked for

A fresh block is the last rows of A, so its columns of B take c. Where one factor has not moved, A_0 + c (A - A_0) or
B_0 + c (B - B_0) is the whole of it, at the same rank. Where both have moved, the two products are stacked, at twice the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.geometry import Factors


def scaled_change(now: Factors, before: Factors | None, scale: float) -> Factors:
    """Return factors whose change since `before` is `scale` times what it was, in float64."""
    A, B = in_float64(now.A.detach()), in_float64(now.B.detach())
    if before is None:
        return Factors(A, scale * B, now.scale)
    A0, B0 = in_float64(before.A.detach()), in_float64(before.B.detach())
    if now.grown_from(before) is not None:
        return Factors(A, torch.cat([B[:, : before.rank], scale * B[:, before.rank :]], dim=1), now.scale)
    same = now.scale == before.scale and A.shape == A0.shape
    if same and torch.equal(B, B0):
        return Factors(_between(A0, A, scale), B, now.scale)
    if same and torch.equal(A, A0):
        return Factors(A, _between(B0, B, scale), now.scale)
    return Factors(torch.cat([A0, A]), torch.cat([(1 - scale) * before.scale / now.scale * B0, scale * B], dim=1), now.scale)


def _between(start: Tensor, end: Tensor, scale: float) -> Tensor:
    return start + scale * (end - start)
