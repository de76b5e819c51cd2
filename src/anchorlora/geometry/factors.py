"""The factors of one LoRA block, and its change since an anchor:  dW = s (B A - B_0 A_0) = s (B_0 dA + dB A).

A  (r, d_in)  routing factor      B  (d_out, r)  output basis      s  scale: alpha / r, or alpha / sqrt(r) with rslora
dA = A - A_0, dB = B - B_0  displacements from the anchor (A_0, B_0)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.geometry.product import Product


@dataclass(frozen=True, eq=False)
class Factors:
    """A block's A (r, d_in), B (d_out, r) and scale; live parameters or copies."""

    A: Tensor
    B: Tensor
    scale: float

    def __post_init__(self) -> None:
        if self.A.ndim != 2 or self.B.ndim != 2 or self.A.shape[0] != self.B.shape[1]:
            raise ValueError(f"factors do not fit: A {tuple(self.A.shape)} must be (r, d_in), B {tuple(self.B.shape)} (d_out, r)")

    @property
    def rank(self) -> int:
        return self.A.shape[0]

    def copy(self) -> Factors:
        """Detached copies of both factors."""
        return Factors(self.A.detach().clone(), self.B.detach().clone(), self.scale)

    def whole(self) -> Factors:
        """Both factors as whole tensors; gathered where they are split over processes, so all processes must ask."""
        A, B = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (self.A, self.B))
        return Factors(A, B, self.scale)

    def scaled_to(self, scale: float) -> Factors:
        """The same product s B A with another scale, in float32: B takes the ratio, computed in float64."""
        A, B = self.A.detach().float(), self.B.detach().float()
        if scale != self.scale:
            B = (in_float64(self.B.detach()) * (self.scale / scale)).float().to(B.device)
        return Factors(A, B, scale)

    def padded(self, rank: int) -> Factors:
        """The same product with rows of zeros behind, up to `rank`."""
        missing = rank - self.rank
        if missing == 0:
            return self
        A, B = self.A.new_zeros(missing, self.A.shape[1]), self.B.new_zeros(self.B.shape[0], missing)
        return Factors(torch.cat([self.A, A]), torch.cat([self.B, B], dim=1), self.scale)

    def product(self) -> Product:
        """s B A, thin."""
        return Product(self.scale * self.B, self.A)

    def since(self, anchor: Factors) -> Product:
        """The change s (B A - B_0 A_0), built from displacements so that a small change keeps all its digits.

        In float64, where the difference of two nearby float32 numbers is exact. Blocks of another rank or scale have no
        displacement; their two products are stacked, which costs the digits that the two have in common.
        """
        A, B, A0, B0 = (in_float64(x.detach()) for x in (self.A, self.B, anchor.A, anchor.B))
        if A.shape[1] != A0.shape[1] or B.shape[0] != B0.shape[0]:
            raise ValueError(f"these factors belong to different layers: {_sizes(self)} against {_sizes(anchor)}")
        s, s0 = self.scale, anchor.scale
        if self.rank == anchor.rank and s == s0:
            return Product(s * torch.cat([B0, B - B0], dim=1), torch.cat([A - A0, A], dim=0))
        return Product(torch.cat([s * B, -s0 * B0], dim=1), torch.cat([A, A0], dim=0))

    def grown_from(self, earlier: Factors) -> Factors | None:
        """The newer rows, when `earlier` is the unchanged beginning of this stack of blocks; else None."""
        r = earlier.rank
        same_scale = abs(self.scale - earlier.scale) <= 1e-12 * abs(earlier.scale)  # alpha / r on disk rounds the last digit
        fits = self.rank > r and same_scale and self.A.shape[1] == earlier.A.shape[1]
        if fits and torch.equal(self.A[:r], earlier.A) and torch.equal(self.B[:, :r], earlier.B):
            return Factors(self.A[r:], self.B[:, r:], self.scale)
        return None

    def unborn(self) -> Factors:
        """This block before it had any effect: the same A, and B = 0."""
        return Factors(self.A, torch.zeros_like(self.B), self.scale)

    def paths(self, anchor: Factors) -> tuple[Product, Product, Product]:
        """The three paths of a change (paper, eq. 6): s B_0 dA, s dB A_0, s dB dA.  Equal ranks only."""
        A, B, A0, B0 = (in_float64(x.detach()) for x in (self.A, self.B, anchor.A, anchor.B))
        s = self.scale
        return Product(s * B0, A - A0), Product(s * (B - B0), A0), Product(s * (B - B0), A - A0)


def _sizes(factors: Factors) -> str:
    return f"A {tuple(factors.A.shape)}, B {tuple(factors.B.shape)}"
