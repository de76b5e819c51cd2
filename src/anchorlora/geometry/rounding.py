"""Merging an update into a weight, and the error of rounding the result to a storage type.

    W' = round(W + dW)            dW = s B A, thin; W, W' (d_out, d_in)
    error = |W' - (W + dW)|       of an update of size |dW|
    moved = W' - (W + dW_0)       the layer's change since an earlier state dW_0; on_core = |moved V|

Works on a few rows at a time, so nothing else of the size of W is formed. Rounding W + dW to bfloat16 moves every entry by up to
2^-8 of the WEIGHT, in every direction, however small the update is: a small update is lost in it, and a protected update is no
longer protected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.errors import InvalidType
from anchorlora.geometry.low_rank import Product
from anchorlora.geometry.subspace import Subspace

ENTRIES = 1 << 22  # per group of rows: 32 MiB in float64


@dataclass(frozen=True)
class Rounding:
    """Frobenius norms that describe one layer's merge."""

    update: float
    error: float  # rounding error of the merged weight, |W' - (W + dW)|
    moved: float | None = None  # change of the layer since the earlier state, |W' - (W + dW_0)|; None if no earlier state was given
    on_core: float | None = None  # part of that change on the protected subspace, |(W' - (W + dW_0)) V|; None if no core was given

    @property
    def relative(self) -> float:
        """Rounding error relative to the size of the update; 0 if both are zero, infinite if only the update is."""
        return self.error / self.update if self.update else (float("inf") if self.error else 0.0)


def merge_(
    weight: Tensor, update: Product, dtype: torch.dtype, *, before: Product | None = None, core: Subspace | None = None
) -> Rounding:
    """Add an update to a weight in place: sum in float64, round to `dtype`, store in the weight's own type:
    `weight` (d_out, d_in).
    """
    if torch.promote_types(weight.dtype, dtype) != weight.dtype:
        raise InvalidType(f"a weight in {weight.dtype} cannot hold what is rounded to {dtype}")
    left, right = in_float64(update.left.detach()), in_float64(update.right.detach())
    squares = dict.fromkeys(("update", "error", "moved", "on_core"), 0.0)
    step = max(1, ENTRIES // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        old, added = in_float64(weight[rows].detach()), left[rows] @ right
        new = in_float64((old + added).to(dtype))
        squares["update"] += float(added.square().sum())
        squares["error"] += float((new - (old + added)).square().sum())
        if before is not None and core is not None:
            moved = new - old - in_float64(before.left[rows].detach()) @ in_float64(before.right.detach())
            squares["moved"] += float(moved.square().sum())
            squares["on_core"] += float(core.coordinates(moved).square().sum())
        with torch.no_grad():
            weight[rows] = new.to(weight.dtype)
    norms = {name: value**0.5 for name, value in squares.items()}
    if before is None or core is None:
        return Rounding(norms["update"], norms["error"])
    return Rounding(**norms)
