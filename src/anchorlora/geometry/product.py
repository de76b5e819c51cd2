"""A matrix held as left @ right, because the d_out x d_in matrix is too large to form.

left  (d_out, m)      right  (m, d_in)      m  at most a few hundred
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.geometry.subspace import Subspace


@dataclass(frozen=True, eq=False)
class Product:
    """left (d_out, m) times right (m, d_in)."""

    left: Tensor
    right: Tensor

    def on(self, core: Subspace) -> Product:
        """Its response to the core directions, left (right V), of shape (d_out, k)."""
        return Product(self.left, core.coordinates(self.right))

    def off(self, core: Subspace) -> Product:
        """Its part off the core, left (right P), of shape (d_out, d_in)."""
        return Product(self.left, core.outside(self.right))

    def of(self, rows: Tensor) -> Tensor:
        """What it does to feature rows.  rows (n, d_in) -> (n, d_out)."""
        return (rows.to(self.right) @ self.right.T) @ self.left.T

    def thinned(self) -> Product:
        """The same norms on every core from a smaller left factor (m, m): the triangular one of its QR, in float64."""
        if self.left.shape[0] <= self.left.shape[1]:
            return Product(in_float64(self.left), in_float64(self.right))
        return Product(torch.linalg.qr(in_float64(self.left), mode="r").R, in_float64(self.right))

    def transposed(self) -> Product:
        """The transpose, of shape (d_in, d_out): what it reads and what it writes change places."""
        return Product(self.right.mT, self.left.mT)

    def norm(self) -> Tensor:
        """Frobenius norm, by QR in float64: for measuring.  Costs O((d_out + d_in) m^2), gives no gradient.

        A Gram matrix would lose half the digits; the triangular factors lose none.
        """
        with torch.no_grad():
            left, right = (torch.linalg.qr(in_float64(x), mode="r").R for x in (self.left, self.right.mT))
            return torch.linalg.norm(left @ right.mT)

    def square(self) -> Tensor:
        """Squared Frobenius norm, by Gram matrices (m, m): for training.  Finite gradients also at zero."""
        return ((self.left.mT @ self.left) * (self.right @ self.right.mT)).sum()
