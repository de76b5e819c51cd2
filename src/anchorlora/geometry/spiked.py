"""A covariance as low rank plus identity, M ~ X X^T + e I: the spiked model, of constant size.

    X  (d, m)  directions of the m largest eigenvalues, scaled      e  mean of the other d - m      tr M is kept exactly

Its m strongest directions are as they are; all others count alike, at their mean. A low rank alone would say that nothing depends
on them. Products with thin matrices and powers come from X; no d x d matrix is formed here.

The best rank in two such metrics, exact on a subspace, is `folded`:

    F = s B A  (d_out, d_in)      V  (d_in, k)  directions to keep      G  (d_out, d_out), C  (d_in, d_in)  metrics
    U = [range(G^1/2 F V), the leading left singular directions of the rest of G^1/2 F C^1/2]      (d_out, R), orthonormal
    F' = G^-1/2 U U^T G^1/2 F      rank R,  F' V = F V,  and no projection of F onto R outputs that keeps F V is nearer to F
                                   in |G^1/2 (F' - F) C^1/2|

Every factor is thin: only matrices with as many rows as F has rank are decomposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
from anchorlora.geometry.low_rank import Factors, truncated
from anchorlora.geometry.sketch import SketchedRows
from anchorlora.geometry.spectrum import GrowingRows
from anchorlora.geometry.subspace import Subspace

RIDGE = 1e-2  # of the mean eigenvalue, added to G in a fold: an output that no answer depends on still counts a little


@dataclass(frozen=True, eq=False)
class SpikedCovariance:
    """A positive semidefinite matrix held as X X^T + e I: `directions` (d, m), `values` (m,)."""

    directions: Tensor  # orthonormal directions of the largest eigenvalues (d, m), strongest first, float64
    values: Tensor  # those eigenvalues (m,), float64, the tail included
    tail: float  # the eigenvalue of every other direction

    @classmethod
    def of(cls, rows: GrowingRows | SketchedRows, rank: int, *, floor: float = 0.0) -> SpikedCovariance:
        """Return sum of x x^T over rows, plus floor times I."""
        d = rows.width
        if rows.total == 0.0:
            nothing = torch.zeros(d, 0, dtype=torch.float64, device="cpu")
            return cls(nothing, nothing.new_zeros(0), floor)
        spectrum = rows.spectrum(rank)
        V, values = spectrum.directions, spectrum.shares.clamp(min=0) * rows.total
        others = d - len(values)
        left = max(0.0, rows.total - float(values.sum()))
        return cls(V, values + floor, floor + left / others if others else floor)

    @classmethod
    def read(cls, root: Tensor, tail: Tensor) -> SpikedCovariance:
        """Return the matrix that `root` and the tail were written from."""
        X, e = in_float64(root), float(tail)
        norms = X.norm(dim=0)
        kept = norms > 0
        Q, R = torch.linalg.qr(X[:, kept] / norms[kept])
        return cls(Q * R.diagonal().sign(), norms[kept].square() + e, e)  # QR gives signs to columns that are orthogonal already

    @property
    def root(self) -> Tensor:
        """X (d, m) with X X^T + e I equal to the matrix."""
        return self.directions * (self.values - self.tail).clamp(min=0).sqrt()

    @property
    def d(self) -> int:
        """Side of the matrix."""
        return self.directions.shape[0]

    @property
    def trace(self) -> float:
        """Sum of all eigenvalues."""
        return float(self.values.sum()) + self.tail * (self.d - len(self.values))

    def times(self, thin: Tensor) -> Tensor:
        """Return M times a matrix (d, n), in float64."""
        return self.power(thin, 1.0)

    def power(self, thin: Tensor, exponent: float, *, ridge: float = 0.0) -> Tensor:
        """Return (M + ridge I)^exponent times a matrix, in float64: `thin` (d, n)."""
        x, Q = in_float64(thin), self.directions
        others = (self.tail + ridge) ** exponent if self.tail + ridge > 0 else 0.0
        spikes = (self.values + ridge) ** exponent - others
        return Q @ (spikes[:, None] * (Q.T @ x)) + others * x

    def k_star(self, energy: float) -> int | None:
        """Return the smallest number of directions that holds a share of the trace; None if more are needed than are held."""
        reached = (self.values.cumsum(0) >= energy * self.trace * (1 - 1e-12)).nonzero()
        return int(reached[0]) + 1 if len(reached) else None

    def retained(self, k: int) -> float:
        """Return the share of the trace on the first k directions."""
        return min(1.0, float(self.values[:k].sum()) / self.trace)

    def leading(self, k: int) -> Subspace:
        """Return the span of the first k directions, in float32."""
        if k > len(self.values):
            raise InvalidValue(f"{k} directions are asked for and {len(self.values)} are known")
        return Subspace(self.directions[:, :k].float().contiguous())


def folded(
    factors: Factors,
    rank: int,
    *,
    keep: Subspace | None = None,
    inputs: SpikedCovariance | None = None,
    outputs: SpikedCovariance | None = None,
) -> Factors:
    """Return factors of lower rank, equal on a subspace, nearest elsewhere: `inputs` (d_in, d_in), `outputs` (d_out, d_out)."""
    if factors.rank <= rank:
        return factors
    A, B = in_float64(factors.A), in_float64(factors.B)
    home = A.device
    ridge = RIDGE * outputs.trace / outputs.d if outputs is not None else 0.0

    def scaled(thin: Tensor, exponent: float) -> Tensor:
        return outputs.power(thin.cpu(), exponent, ridge=ridge).to(home) if outputs is not None and outputs.trace > 0 else thin

    L = scaled(B, 0.5)  # G^1/2 B
    held = L.new_zeros(len(L), 0)
    if keep is not None:
        left, values, _ = torch.linalg.svd(L @ keep.coordinates(A), full_matrices=False)
        held = left[:, values > 1e-9 * values[0]]
    if held.shape[1] > rank:
        raise InvalidValue(
            f"the response on {held.shape[1]} protected directions must be kept, and a fold to rank {rank} has no room; take a "
            "larger rank or smaller cores"
        )
    read = inputs.power(A.T.cpu(), 0.5).T.to(home) if inputs is not None and inputs.trace > 0 else A  # A C^1/2
    Y = (L - held @ (held.T @ L)) @ torch.linalg.qr(read.T, mode="r").R.T  # its left singular directions are those of G^1/2 F C^1/2
    rest = torch.linalg.svd(Y, full_matrices=False).U[:, : rank - held.shape[1]]
    U = torch.linalg.qr(torch.cat([held, rest], dim=1)).Q
    near = truncated(Factors((U.T @ L) @ A, scaled(U, -0.5), factors.scale), rank)  # the same product, in factors that round little
    return Factors(near.A.to(factors.A), near.B.to(factors.B), factors.scale)
