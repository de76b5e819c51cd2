"""Principal directions of feature rows:  X = U S V^T, energy of the first k = sum_{i<=k} s_i^2 / sum_i s_i^2.

    X  (n, d)  feature rows      V  (d, m)  right singular directions, strongest first

Computed in float64 from the Gram matrix of the smaller side, X X^T (n, n) or X^T X (d, d), with one QR polish: as accurate as a
float64 SVD and far faster, where a float32 Gram matrix would lose the weaker half of the directions. The paper takes the right
singular vectors of the stored rows (eq. 3 and 4) and keeps the smallest k that reaches an energy, bounded below and above.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
from anchorlora.geometry.subspace import Subspace

SIDE = 2048  # of the largest Gram matrix that is decomposed exactly: the cost grows with its cube
CARRIED = 1024  # directions that go on from one chunk of rows to the next, where both sides are longer
KEPT = 256  # directions that go on from one part of growing rows to the next: four times the widest basis of the study


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What feature rows span: `directions` (d, m) in float64, and the `energy` (rank,) of the first 1, 2, .. of them.

    dropped: the largest fraction of the energy that merges may have taken from any one direction; 0 where all is exact.
    """

    directions: Tensor
    energy: Tensor
    rows: int
    dropped: float = 0.0

    @classmethod
    def of(cls, rows: Tensor, *, at_most: int) -> Spectrum:
        """The strongest directions of rows (n, d), at most `at_most` and never more than their numerical rank.

        Exact where n or d is at most 2,048. Else rows are merged in chunks that carry the 1,024 strongest directions on: energies
        remain fractions of the true total, and what lies beyond the first thousand directions is dropped. Signs are fixed:
        the largest component of each direction is positive. Raises ValueError for rows that are not finite or all zero.
        """
        gathered = GrowingRows(keep=at_most, device=rows.device)
        gathered.add(rows)
        return gathered.spectrum(at_most)

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


@dataclass(eq=False)
class GrowingRows:
    """Rows that come in parts, one task after another, and X^T X of all of them in the smallest form that holds it.

        up to min(d, 2048) rows     the rows themselves                                            exact
        more, d at most 2048        the matrix X^T X                                               exact
        more, d above 2048          the `keep` strongest directions, times their singular values   drops what is beyond them

    So neither memory nor the cost of a part grows with the number of parts. What merges drop is bounded: X^T X minus what is held
    is positive semidefinite, and no unit vector reads more of it than the sum over merges of the strongest direction dropped.

    device: where decompositions run, with float64, and their results are; what is held stays on the CPU.
    """

    keep: int = KEPT
    device: torch.device | str = "cpu"
    rows: int = 0
    width: int = 0
    total: float = 0.0  # energy of all rows
    dropped: float = 0.0  # energy, by all merges before the rows that came last
    dropping: float = 0.0  # by the merge of those, which what comes next has to do with
    parts: list[Tensor] = field(default_factory=list)
    moment: Tensor | None = None
    values: Tensor | None = None  # singular values of the only part, which holds directions

    def add(self, rows: Tensor) -> None:
        """Take rows (n, d) in.  Raises ValueError for those that are not finite."""
        if rows.ndim != 2:
            raise InvalidValue(f"feature rows have shape (n, d), not {tuple(rows.shape)}")
        energy = float(in_float64(rows).square().sum())
        if not energy < float("inf"):
            raise InvalidValue("feature rows hold NaN or infinite values; nothing can be protected from them")
        self.total, self.rows, self.width = self.total + energy, self.rows + len(rows), rows.shape[1]
        self.parts.append(rows)
        if self.rows > min(self.width, SIDE):
            self._fold()

    def _fold(self) -> None:
        """Put the matrix, or the strongest directions, in the place of the rows."""
        if self.width <= SIDE:
            parts = (in_float64(chunk.to(self.device)) for part in self.parts for chunk in part.split(SIDE))
            moment = reduce(torch.add, (chunk.T @ chunk for chunk in parts)).cpu()
            self.moment, self.parts = moment if self.moment is None else self.moment + moment, []
            return
        joined = self._joined()
        rows, dropped = _merged(joined)
        carried = self.values[: self.keep] if self.values is not None and len(rows) == len(joined) else None
        values, left = _decompose(rows, orthogonal=carried)
        self.dropped += self.dropping + dropped
        self.dropping = float(values[self.keep] ** 2) if len(values) > self.keep else 0.0
        self.values, self.parts = values.cpu(), [_carried(rows, values, left, self.keep).cpu()]

    def _joined(self) -> Tensor:
        return torch.cat([in_float64(part.to(self.device)) for part in self.parts])

    def spectrum(self, at_most: int) -> Spectrum:
        """The strongest directions of all rows so far, as `Spectrum.of` gives them; at most `keep` once directions are dropped."""
        if self.total == 0.0:
            raise InvalidValue("feature rows are all zero; they span no direction")
        if self.moment is not None:
            values, vectors = _strongest(self.moment.to(self.device), self.rows)
            values, vectors = values.sqrt(), vectors[:, : min(len(values), at_most)]
        elif self.values is not None:
            held, values = self.parts[0][:at_most].to(self.device), self.values.to(self.device)
            vectors = held.T / values[: len(held)]
        else:
            rows = self._joined()
            values, left = _decompose(rows)
            m = min(len(values), at_most)
            vectors = rows.T @ (left[:, :m] / values[:m])
        polished = torch.linalg.qr(vectors).Q
        peaks = polished.gather(0, polished.abs().argmax(dim=0, keepdim=True))
        energy = values.square().cumsum(0) / self.total
        return Spectrum(polished * peaks.sign(), energy, self.rows, self.dropped / self.total)


def _merged(rows: Tensor) -> tuple[Tensor, float]:
    """Few enough rows that stand for all, and the energy that merging chunks of them dropped."""
    carried, dropped = rows[: SIDE + CARRIED], 0.0
    for start in range(SIDE + CARRIED, len(rows), SIDE):
        values, left = _decompose(carried)
        dropped += float(values[CARRIED] ** 2) if len(values) > CARRIED else 0.0
        carried = torch.cat([_carried(carried, values, left, CARRIED), rows[start : start + SIDE]])
    return carried, dropped


def _decompose(rows: Tensor, *, orthogonal: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The singular values (rank,) of rows (n, d) that rounding does not explain, and left singular vectors (n, n).

    orthogonal: the norms of the first rows, where those are orthogonal to each other, which saves their part of the Gram matrix.
    """
    first = 0 if orthogonal is None else len(orthogonal)
    gram = rows.new_zeros(len(rows), len(rows))
    gram[first:] = rows[first:] @ rows.T
    if orthogonal is not None:
        gram[:first, first:] = gram[first:, :first].T
        gram[:first].diagonal().copy_(orthogonal.square())
    values, left = _strongest(gram, len(rows))
    return values[: rows.shape[1]].sqrt(), left


def _carried(rows: Tensor, values: Tensor, left: Tensor, keep: int) -> Tensor:
    """The strongest right singular vectors times their singular values, (m, d)."""
    return left[:, : min(len(values), keep)].T @ rows


def _strongest(gram: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The eigenvalues of a Gram matrix that its rounding does not explain, strongest first, and all eigenvectors."""
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    rank = int((values > values[0] * rows * torch.finfo(torch.float64).eps).sum())
    return values[:rank], vectors
