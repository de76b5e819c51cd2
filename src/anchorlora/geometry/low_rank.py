"""Thin products: a matrix held as left @ right, because the d_out x d_in matrix is too large to form.

left  (d_out, m)      right  (m, d_in)      m  at most a few hundred

Factors of one LoRA adapter at one layer, and their change since an anchor:  dW = s (B A - B_0 A_0) = s (B_0 dA + dB A).

A  (r, d_in)  routing factor      B  (d_out, r)  output basis      s  scale: alpha / r, or alpha / sqrt(r) with rslora
dA = A - A_0, dB = B - B_0  displacements from the anchor (A_0, B_0)

Best approximation of lower rank   (Eckart and Young), from thin factors:

    B = Q_B R_B,  A^T = Q_A R_A        R_B R_A^T = U S W^T      (m, m), the only matrix that is decomposed
    B' = Q_B U (S/s)^1/2               A' = (S/s)^1/2 W^T Q_A^T        the first R columns and rows, so |B'| = |A'|
    |s B A - s B' A'|^2 = sum_{i > R} S_i^2

S holds the singular values of s B A, strongest first; no other matrix of rank R is nearer in Frobenius norm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
from anchorlora.geometry.subspace import Subspace


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix (d_out, d_in) held as the thin product left @ right.

    Args:
        left: Left factor (d_out, m).
        right: Right factor (m, d_in).

    Example:
        >>> from anchorlora.geometry import Product, Subspace
        >>> change = Product(torch.tensor([[2.0], [0.0]]), torch.tensor([[0.0, 1.0, 0.0]]))  # [[0, 2, 0], [0, 0, 0]]
        >>> round(change.norm().item(), 6)
        2.0
        >>> core = Subspace(torch.eye(3)[:, :1])
        >>> change.on(core).norm().item()  # it does not touch the first direction
        0.0
    """

    left: Tensor
    right: Tensor

    def on(self, core: Subspace) -> Product:
        """Return the response on the protected directions, left (right V), of shape (d_out, k).

        Args:
            core: Protected subspace of width d_in.
        """
        return Product(self.left, core.coordinates(self.right))

    def off(self, core: Subspace) -> Product:
        """Return the part off the protected subspace, left (right P), of shape (d_out, d_in).

        Args:
            core: Protected subspace of width d_in.
        """
        return Product(self.left, core.outside(self.right))

    def of(self, rows: Tensor) -> Tensor:
        """Apply the matrix to feature rows, as a linear layer does.

        Args:
            rows: Feature rows (n, d_in).

        Returns:
            Outputs (n, d_out).

        Example:
            >>> from anchorlora.geometry import Product
            >>> Product(torch.ones(2, 1), torch.ones(1, 3)).of(torch.tensor([[1.0, 2.0, 3.0]]))
            tensor([[6., 6.]])
        """
        return (rows.to(self.right) @ self.right.T) @ self.left.T

    def thinned(self) -> Product:
        """Return a product with the same norm on every core and a small left factor (m, m): the R of its QR, in float64."""
        if self.left.shape[0] <= self.left.shape[1]:
            return Product(in_float64(self.left), in_float64(self.right))
        return Product(torch.linalg.qr(in_float64(self.left), mode="r").R, in_float64(self.right))

    def transposed(self) -> Product:
        """Return the transpose, of shape (d_in, d_out)."""
        return Product(self.right.mT, self.left.mT)

    def norm(self) -> Tensor:
        """Return the Frobenius norm, by QR in float64: for measuring.

        Costs O((d_out + d_in) m^2) and gives no gradient. A Gram matrix would lose half the digits; the triangular factors
        lose none. For training use `square`.

        Example:
            >>> from anchorlora.geometry import Product
            >>> round(Product(torch.tensor([[3.0], [4.0]]), torch.ones(1, 1)).norm().item(), 6)
            5.0
        """
        with torch.no_grad():
            left, right = (torch.linalg.qr(in_float64(x), mode="r").R for x in (self.left, self.right.mT))
            return torch.linalg.norm(left @ right.mT)

    def square(self) -> Tensor:
        """Return the squared Frobenius norm, by Gram matrices (m, m): for training.  Its gradient is finite at zero too.

        Example:
            >>> from anchorlora.geometry import Product
            >>> A = torch.zeros(1, 3, requires_grad=True)
            >>> Product(torch.ones(2, 1), A).square().backward()
            >>> A.grad
            tensor([[0., 0., 0.]])
        """
        return ((self.left.mT @ self.left) * (self.right @ self.right.mT)).sum()


@dataclass(frozen=True, eq=False)
class Factors:
    """LoRA factors of one layer: its update is s B A.

    The tensors are live parameters or copies of them; nothing is copied here.

    Args:
        A: Routing factor (r, d_in).
        B: Output basis (d_out, r).
        scale: s, which is alpha / r, or alpha / sqrt(r) with rslora.

    Raises:
        InvalidValue: A and B are not matrices with the same rank.

    Example:
        >>> from anchorlora.geometry import Factors
        >>> factors = Factors(A=torch.randn(4, 32), B=torch.zeros(16, 4), scale=2.0)
        >>> start = factors.copy()
        >>> _ = factors.B.add_(0.01)  # an optimizer step
        >>> change = factors.since(start)
        >>> dense = 2.0 * (factors.B @ factors.A - start.B @ start.A)
        >>> torch.allclose((change.left @ change.right).float(), dense)
        True
    """

    A: Tensor
    B: Tensor
    scale: float

    def __post_init__(self) -> None:
        if self.A.ndim != 2 or self.B.ndim != 2 or self.A.shape[0] != self.B.shape[1]:
            raise InvalidValue(f"factors do not fit: A {tuple(self.A.shape)} must be (r, d_in), B {tuple(self.B.shape)} (d_out, r)")

    @property
    def rank(self) -> int:
        """Rank r of the update."""
        return self.A.shape[0]

    def copy(self) -> Factors:
        """Return detached copies of both factors."""
        if torch.is_inference_mode_enabled():  # whatever the caller does, a constraint such as Retract writes to them
            with torch.inference_mode(False):
                return self.copy()
        return Factors(self.A.detach().clone(), self.B.detach().clone(), self.scale)

    def whole(self) -> Factors:
        """Return both factors as whole tensors.  Gathers factors that are split over processes, so all processes must call it."""
        A, B = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (self.A, self.B))
        return Factors(A, B, self.scale)

    def scaled_to(self, scale: float) -> Factors:
        """Return the same product s B A at another scale, in float32: B takes the ratio, computed in float64.

        Args:
            scale: New scale, not 0.

        Example:
            >>> from anchorlora.geometry import Factors
            >>> Factors(torch.ones(1, 2), torch.ones(2, 1), scale=4.0).scaled_to(2.0).B
            tensor([[2.],
                    [2.]])
        """
        A, B = self.A.detach().float(), self.B.detach().float()
        if scale != self.scale:
            B = (in_float64(self.B.detach()) * (self.scale / scale)).float().to(B.device)
        return Factors(A, B, scale)

    def padded(self, rank: int) -> Factors:
        """Return the same product at a larger rank, with zero rows in A and zero columns in B at the end.

        Args:
            rank: New rank, at least the present one.
        """
        missing = rank - self.rank
        if missing == 0:
            return self
        A, B = self.A.new_zeros(missing, self.A.shape[1]), self.B.new_zeros(self.B.shape[0], missing)
        return Factors(torch.cat([self.A, A]), torch.cat([self.B, B], dim=1), self.scale)

    def product(self) -> Product:
        """Return the update s B A as a thin product."""
        return Product(self.scale * self.B, self.A)

    def since(self, anchor: Factors) -> Product:
        """Return the change s (B A - B_0 A_0) since an anchor, thin.

        Built from displacements, so a small change keeps all its digits. Computed in float64, where the difference of two nearby
        float32 numbers is exact. Factors of another rank or scale have no displacement; then the two products are stacked, which
        costs the digits that they have in common.

        Args:
            anchor: Factors of the same layer at an earlier time.

        Returns:
            The change as a thin product with inner size 2r, in float64.

        Raises:
            InvalidValue: The factors belong to layers of different sizes.
        """
        A, B, A0, B0 = (in_float64(x.detach()) for x in (self.A, self.B, anchor.A, anchor.B))
        if A.shape[1] != A0.shape[1] or B.shape[0] != B0.shape[0]:
            raise InvalidValue(f"these factors belong to different layers: {_sizes(self)} against {_sizes(anchor)}")
        s, s0 = self.scale, anchor.scale
        if self.rank == anchor.rank and s == s0:
            return Product(s * torch.cat([B0, B - B0], dim=1), torch.cat([A - A0, A], dim=0))
        return Product(torch.cat([s * B, -s0 * B0], dim=1), torch.cat([A, A0], dim=0))

    def grown_from(self, earlier: Factors) -> Factors | None:
        """Return the newer rows if `earlier` is the unchanged beginning of these stacked factors.

        Args:
            earlier: Factors of the same layer, of lower rank.

        Returns:
            The factors after the first `earlier.rank` rows, or None if the beginning differs.
        """
        r = earlier.rank
        same_scale = abs(self.scale - earlier.scale) <= 1e-12 * abs(earlier.scale)  # alpha / r on disk rounds the last digit
        fits = self.rank > r and same_scale and self.A.shape[1] == earlier.A.shape[1]
        if fits and torch.equal(self.A[:r], earlier.A) and torch.equal(self.B[:, :r], earlier.B):
            return Factors(self.A[r:], self.B[:, r:], self.scale)
        return None

    def unborn(self) -> Factors:
        """Return these factors before they had any effect: the same A, and B = 0."""
        return Factors(self.A, torch.zeros_like(self.B), self.scale)

    def storage_floor(self, *, k: int, d: int, unit: float) -> float:
        """Return the norm on k of d directions that rounding of the factors explains: unit s |B| |A| sqrt(k/(d r)).

        Args:
            k: Number of directions.
            d: Width d_in.
            unit: Relative error of one rounding.
        """
        A, B = in_float64(self.A.detach()), in_float64(self.B.detach())
        return unit * self.scale * float(B.norm()) * float(A.norm()) * math.sqrt(k / (d * self.rank))

    def paths(self, anchor: Factors) -> tuple[Product, Product, Product]:
        """Return the three terms of the change since an anchor (paper, eq. 6): s B_0 dA, s dB A_0 and s dB dA.

        Args:
            anchor: Factors of the same layer and of equal rank at an earlier time.

        Example:
            >>> from anchorlora.geometry import Factors
            >>> start = Factors(torch.ones(1, 2), torch.zeros(2, 1), 1.0)
            >>> now = Factors(torch.full((1, 2), 3.0), torch.ones(2, 1), 1.0)
            >>> [round(term.norm().item(), 6) for term in now.paths(start)]
            [0.0, 2.0, 4.0]
        """
        A, B, A0, B0 = (in_float64(x.detach()) for x in (self.A, self.B, anchor.A, anchor.B))
        s = self.scale
        return Product(s * B0, A - A0), Product(s * (B - B0), A0), Product(s * (B - B0), A - A0)


def _sizes(factors: Factors) -> str:
    return f"A {tuple(factors.A.shape)}, B {tuple(factors.B.shape)}"


def singular(product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition of a product, in float64: returns (d_out, n)."""
    left, right = (torch.linalg.qr(in_float64(x.detach())) for x in (product.left, product.right.mT))
    U, S, W = torch.linalg.svd(left.R @ right.R.mT, full_matrices=False)
    return left.Q @ U, S, W @ right.Q.mT


def truncated(factors: Factors, rank: int) -> Factors:
    """Return the nearest factors of a given rank (Eckart and Young), at the same scale and in float64."""
    if rank < 1:
        raise InvalidValue(f"the rank of LoRA factors is 1 or more, not {rank}")
    if factors.scale == 0:  # the update is zero
        return Factors(factors.A.new_zeros(rank, factors.A.shape[1]), factors.B.new_zeros(factors.B.shape[0], rank), 0.0)
    left, values, right = singular(factors.product())
    root = (values[:rank] / abs(factors.scale)).sqrt()
    A, B = root[:, None] * right[:rank], left[:, :rank] * (root if factors.scale > 0 else -root)
    return Factors(A, B, factors.scale).padded(rank)


def one_scale(factors: Mapping[str, Factors]) -> float:
    """Return the scale that all layers take where they must share one: that of most layers.

    Never 0, at which nothing could be learned; llama.cpp reads alpha 0 as "no alpha", which is a scale of 1.
    """
    count = Counter(f.scale for f in factors.values() if f.scale != 0)
    return count.most_common(1)[0][0] if count else 1.0


def scaled_change(now: Factors, before: Factors | None, scale: float) -> Factors:
    """Return factors whose change since `before` is `scale` times what it was, in float64: s_0 B_0 A_0 + c (s B A - s_0 B_0 A_0).

    A fresh block is the last rows of A, so its columns of B take c. Where one factor has not moved, A_0 + c (A - A_0) or
    B_0 + c (B - B_0) is the whole of it, at the same rank. Where both have moved, the two products are stacked, at twice the rank.
    """
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
