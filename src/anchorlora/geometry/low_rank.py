"""A matrix held as left @ right, because the d_out x d_in matrix is too large to form.

left  (d_out, m)      right  (m, d_in)      m  at most a few hundred

The factors of one LoRA block, and its change since an anchor:  dW = s (B A - B_0 A_0) = s (B_0 dA + dB A).

A  (r, d_in)  routing factor      B  (d_out, r)  output basis      s  scale: alpha / r, or alpha / sqrt(r) with rslora
dA = A - A_0, dB = B - B_0  displacements from the anchor (A_0, B_0)

The best approximation of lower rank of a block's update   (Eckart and Young), from thin factors.

    B = Q_B R_B,  A^T = Q_A R_A        R_B R_A^T = U S W^T      (m, m), the only matrix that is decomposed
    B' = Q_B U (S/s)^1/2               A' = (S/s)^1/2 W^T Q_A^T        the first R columns and rows, so |B'| = |A'|
    |s B A - s B' A'|^2 = sum_{i > R} S_i^2

S holds the singular values of s B A, strongest first; no other matrix of rank R is nearer in Frobenius norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
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


@dataclass(frozen=True, eq=False)
class Factors:
    """A block's A (r, d_in), B (d_out, r) and scale; live parameters or copies."""

    A: Tensor
    B: Tensor
    scale: float

    def __post_init__(self) -> None:
        if self.A.ndim != 2 or self.B.ndim != 2 or self.A.shape[0] != self.B.shape[1]:
            raise InvalidValue(f"factors do not fit: A {tuple(self.A.shape)} must be (r, d_in), B {tuple(self.B.shape)} (d_out, r)")

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
            raise InvalidValue(f"these factors belong to different layers: {_sizes(self)} against {_sizes(anchor)}")
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


def singular(product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """The thin decomposition left (d_out, n), values (n,), right (n, d_in), in float64; n at most the inner size m."""
    left, right = (torch.linalg.qr(in_float64(x.detach())) for x in (product.left, product.right.mT))
    U, S, W = torch.linalg.svd(left.R @ right.R.mT, full_matrices=False)
    return left.Q @ U, S, W @ right.Q.mT


def truncated(factors: Factors, rank: int) -> Factors:
    """The nearest block of `rank` rows and of the same scale, in float64; rows beyond what there is to hold are zero."""
    if rank < 1:
        raise InvalidValue(f"a block has a rank of 1 or more, not {rank}")
    if factors.scale == 0:  # an update of nothing
        return Factors(factors.A.new_zeros(rank, factors.A.shape[1]), factors.B.new_zeros(factors.B.shape[0], rank), 0.0)
    left, values, right = singular(factors.product())
    root = (values[:rank] / abs(factors.scale)).sqrt()
    A, B = root[:, None] * right[:rank], left[:, :rank] * (root if factors.scale > 0 else -root)
    missing = rank - len(root)
    A = torch.cat([A, A.new_zeros(missing, A.shape[1])])
    B = torch.cat([B, B.new_zeros(B.shape[0], missing)], dim=1)
    return Factors(A, B, factors.scale)
