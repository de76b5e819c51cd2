"""A weight with an update merged in, and what rounding it to a storage type costs.

    W' = round(W + dW)            dW = s B A, thin; W, W' (d_out, d_in)
    error = |W' - (W + dW)|       of an update of size |dW|
    moved = W' - (W + dW_0)       what the layer changed by since an earlier state dW_0; on_core = |moved V|

Rows are taken a few at a time, so beside W and W' nothing of their size is formed. Rounding W + dW to bfloat16 moves every
entry by up to 2^-8 of the WEIGHT, whatever the size of the update, and in every direction: a small update drowns, and a
protected one is protected no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.errors import InvalidType
from anchorlora.geometry.low_rank import Product
from anchorlora.geometry.subspace import Subspace

ENTRIES = 1 << 22  # of one block of rows: 32 MiB in float64


@dataclass(frozen=True)
class Rounding:
    """Frobenius norms of one layer's merge; `moved` and `on_core` are None where no earlier state is protected."""

    update: float
    error: float
    moved: float | None = None
    on_core: float | None = None

    @property
    def relative(self) -> float:
        """The error relative to the update; 0 where neither is anything."""
        return self.error / self.update if self.update else (float("inf") if self.error else 0.0)


def merge_(
    weight: Tensor, update: Product, dtype: torch.dtype, *, before: Product | None = None, core: Subspace | None = None
) -> Rounding:
    """Add the update to weight (d_out, d_in) in place: summed in float64, rounded to `dtype`, stored as the weight is stored.

    before, core: the update at an earlier state and the directions protected since. The weight must hold `dtype` without loss.
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
