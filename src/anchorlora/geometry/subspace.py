"""A protected subspace: inside = x V V^T, outside = x P with P = I - V V^T.

V  (d, k)  orthonormal directions as columns      P  (d, d)  never formed

Leading singular directions of a weight:  W = U S V^T, the first k columns of U and V   (as OSF protects them).

    W  (d_out, d_in)      U  (d_out, k)  left, what the layer writes      V  (d_in, k)  right, what it reads

From the Gram matrix of the smaller side in float64, with one QR polish a side: a cost of min(d_out, d_in)^3, where the full SVD
takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64, placed
from anchorlora.errors import InvalidType, InvalidValue, NotFinite

# How far V^T V may be from I (Frobenius norm): float32 storage of an orthonormal basis leaves about 1e-7,
# bfloat16 storage 1e-3, which would void every promise made with it.
ORTHONORMAL = 1e-5


@dataclass(frozen=True, eq=False)
class Subspace:
    """The span of `basis` (d, k), whose columns are orthonormal, in float32 or float64.

    sound: leading columns that were found orthonormal before, so that only the others are looked at.
    """

    basis: Tensor
    _: KW_ONLY
    sound: InitVar[int] = 0

    def __post_init__(self, sound: int) -> None:
        V = self.basis
        if V.ndim != 2:
            raise InvalidValue(f"a basis has shape (d, k), not {tuple(V.shape)}")
        if V.shape[1] == 0:
            raise InvalidValue(f"this basis {tuple(V.shape)} has no direction, so nothing would be protected with it")
        if V.dtype not in (torch.float32, torch.float64):
            raise InvalidType(f"a protected basis needs float32 or float64, not {V.dtype}: project with what was decomposed")
        self.check(sound=sound)

    def check(self, *, sound: int = 0) -> None:
        """The basis as it is now, which other programs can reach.  Raises ValueError unless its columns are orthonormal."""
        V = in_float64(self.basis)
        if not bool(torch.isfinite(V[:, sound:]).all()):
            raise NotFinite("this basis holds NaN or infinite values; nothing can be protected with it")
        gram = V[:, sound:].T @ V
        gram[:, sound:].diagonal().sub_(1)
        error = float(torch.linalg.norm(gram))
        if not error <= ORTHONORMAL:
            raise InvalidValue(
                f"the columns of this basis are not orthonormal: |V^T V - I| = {error:.1e}, allowed {ORTHONORMAL:.0e}; "
                "orthonormalize it first (torch.linalg.qr)"
            )

    @property
    def d(self) -> int:
        """Width of the space that the directions live in."""
        return self.basis.shape[0]

    @property
    def k(self) -> int:
        """Number of directions."""
        return self.basis.shape[1]

    def coordinates(self, rows: Tensor) -> Tensor:
        """Components along the directions.  rows (..., d) -> (..., k)."""
        return rows @ placed(self.basis, rows.dtype, rows.device)

    def inside(self, rows: Tensor) -> Tensor:
        """The part of each row in the subspace.  rows (..., d) -> (..., d)."""
        basis = placed(self.basis, rows.dtype, rows.device)
        return (rows @ basis) @ basis.T

    def outside(self, rows: Tensor) -> Tensor:
        """The part of each row orthogonal to the subspace, rows P.  rows (..., d) -> (..., d)."""
        return rows - self.inside(rows)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Subspace:
        """The same directions in another dtype or on another device."""
        basis = placed(self.basis, dtype or self.basis.dtype, torch.device(device or self.basis.device))
        return self if basis is self.basis else Subspace(basis)

    def joined(self, other: Subspace) -> Subspace:
        """The sum of both, in float64: this basis as it is, then those directions of the other that it does not hold.

        A direction is new where more than 1e-6 of it lies outside, as for `joining`. To join one after another costs far less than
        to join all anew.
        """
        held = self.to(dtype=torch.float64)
        directions, values, _ = torch.linalg.svd(held.outside(other.basis.to(held.basis).T).T, full_matrices=False)
        directions = held.outside(directions[:, values > 1e-6].T).T  # again: what was nearly inside has lost its digits
        return Subspace(torch.cat([held.basis, torch.linalg.qr(directions).Q.contiguous()], dim=1), sound=held.k)

    @classmethod
    def joining(cls, parts: Sequence[Subspace]) -> Subspace:
        """The sum of several subspaces of one space; directions that others already hold are counted once.

        Decomposed in float64; a direction counts as new where its singular value among the joined unit columns
        exceeds 1e-6, which lies above float32 storage (1e-7) and far below a principal angle that matters.
        """
        if not parts:
            raise InvalidValue("joining needs at least one subspace")
        columns = torch.cat([placed(part.basis, torch.float64, torch.device("cpu")) for part in parts], dim=1)
        values, vectors = torch.linalg.eigh(columns.T @ columns)
        keep = values > 1e-12
        directions = columns @ (vectors[:, keep] / values[keep].sqrt())
        return cls(torch.linalg.qr(directions).Q.contiguous())


def singular_directions(weight: Tensor, k: int) -> tuple[Subspace, Subspace]:
    """(U, V) of the k largest singular values of weight (d_out, d_in), in float64.

    Raises ValueError when the weight is not finite, or has fewer than k singular values above rounding: where a singular value
    is nothing but rounding, its directions are chance.
    """
    if weight.ndim != 2:
        raise InvalidValue(f"singular directions need a matrix (d_out, d_in), not {tuple(weight.shape)}")
    W = in_float64(weight.detach())
    if not bool(torch.isfinite(W).all()):
        raise InvalidValue("the weight holds NaN or infinite values; it has no singular directions")
    tall = W.shape[0] >= W.shape[1]
    X = W if tall else W.T  # (n, m) with n >= m
    values, vectors = torch.linalg.eigh(X.T @ X)
    rank = int((values > values[-1].clamp(min=0) * X.shape[0] * torch.finfo(torch.float64).eps).sum())
    if not 1 <= k <= rank:
        raise InvalidValue(f"a weight of shape {tuple(weight.shape)} and rank {rank} has no {k} leading singular directions")
    near = vectors[:, -k:].flip(1)
    narrow, wide = torch.linalg.qr(near).Q, torch.linalg.qr(X @ near).Q
    return (Subspace(wide), Subspace(narrow)) if tall else (Subspace(narrow), Subspace(wide))
