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
    """Frobenius norms that describe one layer's merge.

    Attributes:
        update: Size of the update, |dW|.
        error: Rounding error of the merged weight, |W' - (W + dW)|.
        moved: Change of the layer since the earlier state, |W' - (W + dW_0)|; None if no earlier state was given.
        on_core: Part of that change on the protected subspace, |(W' - (W + dW_0)) V|; None if no core was given.
    """

    update: float
    error: float
    moved: float | None = None
    on_core: float | None = None

    @property
    def relative(self) -> float:
        """Rounding error relative to the size of the update; 0 if both are zero, infinite if only the update is.

        Example:
            >>> from anchorlora.geometry import Rounding
            >>> Rounding(update=0.5, error=0.25).relative
            0.5
        """
        return self.error / self.update if self.update else (float("inf") if self.error else 0.0)


def merge_(
    weight: Tensor, update: Product, dtype: torch.dtype, *, before: Product | None = None, core: Subspace | None = None
) -> Rounding:
    """Add an update to a weight in place: sum in float64, round to `dtype`, store in the weight's own type.

    Args:
        weight: Weight (d_out, d_in); its type must represent every value of `dtype`. It is overwritten.
        update: Update dW of the same shape, as a thin product.
        dtype: Type to round the merged weight to.
        before: Update dW_0 of an earlier state, to measure the change since then.
        core: Directions protected since that state. `moved` and `on_core` are measured if both are given.

    Returns:
        The norms of the update, of the rounding error and, on request, of the change.

    Raises:
        InvalidType: The weight's type cannot hold values of `dtype` without loss.

    Example:
        >>> from anchorlora.geometry import Factors, merge_
        >>> weight = torch.ones(8, 8)
        >>> update = Factors(torch.full((1, 8), 1e-3), torch.ones(8, 1), 1.0).product()
        >>> merge_(weight, update, torch.bfloat16).relative  # the whole update is lost to rounding
        1.0
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
