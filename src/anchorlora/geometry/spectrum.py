"""Principal directions of feature rows:  X = U S V^T, energy of the first k = sum_{i<=k} s_i^2 / sum_i s_i^2.

    X  (n, d)  feature rows      V  (d, m)  right singular directions, strongest first

Computed from the n x n Gram matrix in float64 with one QR polish: as accurate as a float64 SVD and far faster, where a
float32 Gram matrix would lose the weaker half of the directions. The paper takes the right singular vectors of the
stored rows (eq. 3 and 4) and keeps the smallest k that reaches an energy, bounded below and above.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.geometry.subspace import Subspace

CHUNK = 2048  # rows decomposed at once: an n x n problem, so its cost grows with the cube of this
CARRIED = 1024  # directions that go on from one chunk to the next when there are more rows than that


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What feature rows span: `directions` (d, m) in float64, and the `energy` (rank,) of the first 1, 2, .. of them."""

    directions: Tensor
    energy: Tensor
    rows: int

    @classmethod
    def of(cls, rows: Tensor, *, at_most: int) -> Spectrum:
        """The strongest directions of rows (n, d), at most `at_most` and never more than their numerical rank.

        Exact for up to 2,048 rows. More rows are merged in chunks that carry the 1,024 strongest directions on: energies
        remain fractions of the true total, and what lies beyond the first thousand directions is dropped. Signs are fixed:
        the largest component of each direction is positive. Raises ValueError for rows that are not finite or all zero.
        """
        if rows.ndim != 2:
            raise ValueError(f"feature rows have shape (n, d), not {tuple(rows.shape)}")
        total = float(in_float64(rows).square().sum())
        if not total < float("inf"):
            raise ValueError("feature rows hold NaN or infinite values; nothing can be protected from them")
        if total == 0.0:
            raise ValueError("feature rows are all zero; they span no direction")
        carried = in_float64(rows[:CHUNK])
        for start in range(CHUNK, rows.shape[0], CHUNK):
            values, vectors = _decompose(carried, CARRIED)
            kept = (vectors * values[: vectors.shape[1]]).T
            carried = torch.cat([kept, in_float64(rows[start : start + CHUNK])])
        values, vectors = _decompose(carried, at_most)
        polished = torch.linalg.qr(vectors).Q
        peaks = polished.gather(0, polished.abs().argmax(dim=0, keepdim=True))
        return cls(polished * peaks.sign(), values.square().cumsum(0) / total, rows.shape[0])

    def k_star(self, energy: float) -> int | None:
        """The smallest k whose directions hold `energy` (a fraction) of the rows; None when a merge dropped too much."""
        slack = 8 * torch.finfo(torch.float64).eps * self.rows
        reached = (self.energy >= energy * (1 - slack)).nonzero()
        return int(reached[0]) + 1 if len(reached) else None

    def retained(self, k: int) -> float:
        """The fraction of the rows' energy in the first k directions."""
        return min(1.0, float(self.energy[k - 1]))

    def leading(self, k: int) -> Subspace:
        """The span of the first k directions, stored in float32."""
        return Subspace(self.directions[:, :k].float().contiguous())


def _decompose(rows: Tensor, at_most: int) -> tuple[Tensor, Tensor]:
    """All singular values (rank,) that rounding alone does not explain, and the first right vectors (d, m)."""
    values, left = torch.linalg.eigh(rows @ rows.T)
    values, left = values.flip(0), left.flip(1)
    above = int((values > values[0] * rows.shape[0] * torch.finfo(torch.float64).eps).sum())
    rank = min(above, rows.shape[1])
    sigma, m = values[:rank].sqrt(), min(rank, at_most)
    return sigma, rows.T @ (left[:, :m] / sigma[:m])
