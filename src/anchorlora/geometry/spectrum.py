"""Principal directions of feature rows:  X = U S V^T, energy of the first k = sum_{i<=k} s_i^2 / sum_i s_i^2.

    X  (n, d)  feature rows      V  (d, m)  right singular directions, strongest first

Computed in float64 from the Gram matrix of the smaller side, X X^T (n, n) or X^T X (d, d), with one QR polish. This is as
accurate as a float64 SVD and far faster; a float32 Gram matrix would lose the weaker half of the directions. The paper takes
the right singular vectors of the stored rows (eqs. 3-4) and keeps the smallest k that reaches an energy, within bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from anchorlora.devices import eigenvectors, in_float64, second_moment
from anchorlora.errors import InvalidValue
from anchorlora.geometry.subspace import Subspace

SIDE = 2048  # side of the largest Gram matrix that is decomposed exactly; the cost grows with its cube
CARRIED = 1024  # directions carried from one chunk of rows to the next when both sides are longer
KEPT = 256  # directions carried from one task's rows to the next: four times the widest basis of the study


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Principal directions of feature rows and the energy that they hold.

    Attributes:
        directions: Right singular vectors (d, m), strongest first, float64.
        energy: Fraction of the squared singular values in the first 1, 2, .. directions, (rank,), float64.
        rows: Number of feature rows n.
        dropped: Upper bound on the fraction of the energy that approximate merges took from any one direction; 0 if exact.

    Example:
        >>> from anchorlora.geometry import Spectrum
        >>> rows = torch.randn(200, 4) * torch.tensor([10.0, 5.0, 1.0, 0.1])
        >>> spectrum = Spectrum.of(rows, at_most=4)
        >>> k = spectrum.k_star(0.93)
        >>> k
        2
        >>> spectrum.retained(k) >= 0.93
        True
        >>> core = spectrum.leading(k)  # the protected subspace of these rows
        >>> core.d, core.k
        (4, 2)
    """

    directions: Tensor
    energy: Tensor
    rows: int
    dropped: float = 0.0

    @classmethod
    def of(cls, rows: Tensor, *, at_most: int) -> Spectrum:
        """Decompose feature rows into their strongest directions (paper, eq. 3).

        Exact if n or d is at most 2,048. Otherwise the rows are merged in chunks that carry the 1,024 strongest directions forward:
        energies remain fractions of the true total, and directions beyond the first thousand are dropped. Signs are fixed: the
        largest component of each direction is positive.

        Args:
            rows: Feature rows (n, d), of any float dtype.
            at_most: Largest number of directions to return. The numerical rank of the rows is a second limit.

        Returns:
            The directions and their energies, on the device of `rows` (on the CPU if that device has no float64).

        Raises:
            InvalidValue: The rows are not a matrix, are not finite, or are all zero.

        Example:
            >>> from anchorlora.geometry import Spectrum
            >>> Spectrum.of(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), at_most=2).energy
            tensor([0.6400, 1.0000], dtype=torch.float64)
        """
        gathered = GrowingRows(keep=at_most, device=rows.device)
        gathered.add(rows)
        return gathered.spectrum(at_most)

    def k_star(self, energy: float) -> int | None:
        """Return the smallest k whose directions hold a given share of the energy (paper, eq. 4).

        Args:
            energy: Share of the squared singular values, in (0, 1].

        Returns:
            The number of directions, or None if merges dropped so much that no k reaches the share.
        """
        slack = 8 * torch.finfo(torch.float64).eps * self.rows
        reached = (self.energy >= energy * (1 - slack)).nonzero()
        return int(reached[0]) + 1 if len(reached) else None

    def retained(self, k: int) -> float:
        """Return the fraction of the rows' energy in the first k directions.

        Args:
            k: Number of directions, at least 1.

        Example:
            >>> from anchorlora.geometry import Spectrum
            >>> round(Spectrum.of(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), at_most=2).retained(1), 2)
            0.64
        """
        return min(1.0, float(self.energy[k - 1]))

    @property
    def shares(self) -> Tensor:
        """Fraction of the energy on each of the directions, (m,)."""
        return torch.diff(self.energy[: self.directions.shape[1]], prepend=self.energy.new_zeros(1))

    def leading(self, k: int) -> Subspace:
        """Return the span of the first k directions, in float32.

        Args:
            k: Number of directions, at most the number in `directions`.
        """
        return Subspace(self.directions[:, :k].float().contiguous())


@dataclass(eq=False)
class GrowingRows:
    """Feature rows that arrive task by task, held in a form that does not grow with the number of tasks: `moment` (d, d).

        up to min(d, 2048) rows     the rows themselves                                            exact
        more, d at most 2048        the matrix X^T X                                               exact
        more, d above 2048          the `keep` strongest directions, times their singular values   drops the directions beyond them

    What merges drop is bounded: X^T X minus its held form is positive semidefinite, and no unit vector sees more of the difference
    than the sum, over all merges, of the strongest direction that each dropped.
    """

    keep: int = KEPT  # number of directions carried forward once rows are too many for an exact form and d is above 2,048
    device: torch.device | str = "cpu"
    rows: int = 0  # number of rows so far
    width: int = 0
    total: float = 0.0  # energy of all rows, the sum of their squares
    dropped: float = 0.0  # energy dropped by all merges before the last one
    dropping: float = 0.0  # energy dropped by the last merge; it counts once more rows arrive
    parts: list[Tensor] = field(default_factory=list)  # rows held as they are, or the carried directions
    moment: Tensor | None = None  # X^T X (d, d), once this form is used
    values: Tensor | None = None  # singular values of the carried directions, once that form is used

    def add(self, rows: Tensor) -> None:
        """Add feature rows: `rows` (n, d)."""
        if rows.ndim != 2:
            raise InvalidValue(f"feature rows have shape (n, d), not {tuple(rows.shape)}")
        exact = in_float64(rows)
        energy = energy_of(exact)
        self.total, self.rows, self.width = self.total + energy, self.rows + len(rows), rows.shape[1]
        self.parts.append(rows if self.moment is None else exact)
        if self.rows > min(self.width, SIDE):
            self._fold()

    def _fold(self) -> None:
        """Replace the rows by their matrix or by their strongest directions."""
        if self.width <= SIDE:
            for chunk in (in_float64(chunk.to(self.device)) for part in self.parts for chunk in part.split(SIDE)):
                moment = second_moment(chunk).cpu()
                self.moment = moment if self.moment is None else self.moment.add_(moment)
            self.parts = []
            return
        joined = self._join()
        rows, dropped = _merge(joined)
        carried = self.values[: self.keep] if self.values is not None and len(rows) == len(joined) else None
        values, left = _decompose(rows, orthogonal=carried)
        self.dropped += self.dropping + dropped
        self.dropping = float(values[self.keep] ** 2) if len(values) > self.keep else 0.0
        self.values, self.parts = values.cpu(), [_carry(rows, values, left, self.keep).cpu()]

    def _join(self) -> Tensor:
        return torch.cat([in_float64(part.to(self.device)) for part in self.parts])

    def spectrum(self, at_most: int) -> Spectrum:
        """Return the strongest directions of all rows so far, as `Spectrum.of` does."""
        if self.total == 0.0:
            raise InvalidValue("feature rows are all zero; they span no direction")
        if self.moment is not None:
            values, vectors = _strongest(self.moment.to(self.device), self.rows)
            values, vectors = values.sqrt(), vectors[:, : min(len(values), at_most)]
        elif self.values is not None:
            held, values = self.parts[0][:at_most].to(self.device), self.values.to(self.device)
            vectors = held.T / values[: len(held)]
        else:
            rows = self._join()
            values, left = _decompose(rows)
            m = min(len(values), at_most)
            vectors = rows.T @ (left[:, :m] / values[:m])
        energy = values.square().cumsum(0) / self.total
        return Spectrum(fixed_signs(torch.linalg.qr(vectors).Q), energy, self.rows, self.dropped / self.total)


def energy_of(rows: Tensor) -> float:
    """The sum of the squares of feature rows, in one pass; rows with NaN or infinite values are refused."""
    flat = rows.flatten()
    if not (energy := float(flat @ flat)) < float("inf"):
        raise InvalidValue("feature rows hold NaN or infinite values; no protected subspace can be made from them")
    return energy


def fixed_signs(directions: Tensor) -> Tensor:
    """Directions (d, m) whose largest component is positive."""
    return directions * directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)).sign()


def _merge(rows: Tensor) -> tuple[Tensor, float]:
    """Few enough rows to stand for all of them, and the energy dropped by merging chunks."""
    carried, dropped = rows[: SIDE + CARRIED], 0.0
    for start in range(SIDE + CARRIED, len(rows), SIDE):
        values, left = _decompose(carried)
        dropped += float(values[CARRIED] ** 2) if len(values) > CARRIED else 0.0
        carried = torch.cat([_carry(carried, values, left, CARRIED), rows[start : start + SIDE]])
    return carried, dropped


def _decompose(rows: Tensor, *, orthogonal: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Singular values (rank,) of rows (n, d) above rounding error, and left singular vectors (n, n). orthogonal: norms of the
    leading rows if these are mutually orthogonal, which saves their part of the Gram matrix.
    """
    first = 0 if orthogonal is None else len(orthogonal)
    gram = rows.new_zeros(len(rows), len(rows))
    gram[first:] = rows[first:] @ rows.T
    if orthogonal is not None:
        gram[:first, first:] = gram[first:, :first].T
        gram[:first].diagonal().copy_(orthogonal.square())
    values, left = _strongest(gram, len(rows))
    return values[: rows.shape[1]].sqrt(), left


def _carry(rows: Tensor, values: Tensor, left: Tensor, keep: int) -> Tensor:
    """The strongest right singular vectors times their singular values, (m, d)."""
    return left[:, : min(len(values), keep)].T @ rows


def _strongest(gram: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a Gram matrix above its rounding error, strongest first, and all eigenvectors."""
    values, vectors = eigenvectors(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    rank = int((values > values[0] * rows * torch.finfo(torch.float64).eps).sum())
    return values[:rank], vectors
