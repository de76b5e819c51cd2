"""Second moments X^T X of rows that arrive bit by bit, held as a sketch that is much thinner than they are.

    X  (n, d)  rows      Omega  (d, q)  random and orthonormal, the same for all rows      Y = X^T X Omega  (d, q)
    X^T X ~ Y (Omega^T Y)^-1 Y^T      Nystroem, with a shift against rounding   (Tropp, Yurtsever, Udell and Cevher 2017, alg. 3)

It takes 4 n d q operations and d q numbers, where X^T X takes 2 n d^2 and d^2. It is never above X^T X, and exact up to rank q. Its
best rank r misses at most 1 + r / (q - r - 1) times what the best rank r misses, in trace norm and expectation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from anchorlora.devices import in_float64, second_moment
from anchorlora.errors import InvalidValue
from anchorlora.geometry.spectrum import GrowingRows, Spectrum, energy_of, fixed_signs

EXACT = 1024  # width up to which rows are held exactly
WIDER = 4  # columns of a sketch over the directions that are asked for


def growing_rows(width: int, rank: int, *, device: torch.device | str) -> GrowingRows | SketchedRows:
    """Return what holds rows of a width until their `rank` strongest directions are asked for."""
    columns = WIDER * rank
    if width <= max(EXACT, 2 * columns):
        return GrowingRows(keep=4 * rank, device=device, width=width)
    return SketchedRows(width, columns, device)


@dataclass(eq=False)
class SketchedRows:
    """Rows of one width, of which the sketch is held."""

    width: int
    columns: int
    device: torch.device | str = "cpu"
    rows: int = 0
    total: float = 0.0  # energy of all rows, the sum of their squares
    sketch: Tensor | None = field(default=None, init=False)

    def add(self, rows: Tensor) -> None:
        """Add rows (n, d)."""
        rows = in_float64(rows.to(self.device))
        energy = energy_of(rows)
        seen = second_moment(rows, _test_matrix(self.width, self.columns).to(self.device))
        self.sketch = seen if self.sketch is None else self.sketch.add_(seen)
        self.rows, self.total = self.rows + len(rows), self.total + energy

    def spectrum(self, at_most: int) -> Spectrum:
        """Return the strongest directions, and the shares of the energy that the sketch holds of them."""
        if self.sketch is None or self.total == 0.0:
            raise InvalidValue("feature rows are all zero; they span no direction")
        omega = _test_matrix(self.width, self.columns).to(self.device)
        shift = torch.finfo(torch.float64).eps * float(self.sketch.norm())
        shifted = self.sketch + shift * omega
        core = omega.T @ shifted
        values, vectors = torch.linalg.eigh((core + core.T) / 2)
        held = values > values[-1] * len(values) * torch.finfo(torch.float64).eps
        root = shifted @ (vectors[:, held] / values[held].sqrt())
        left, singular, _ = torch.linalg.svd(root, full_matrices=False)
        energy = (singular.square() - shift).clamp(min=0)
        rank = int((energy > energy[0] * self.width * torch.finfo(torch.float64).eps).sum())
        directions = fixed_signs(left[:, : min(rank, at_most)])
        return Spectrum(directions, energy[:rank].cumsum(0) / self.total, self.rows)


@lru_cache(maxsize=8)
def _test_matrix(width: int, columns: int) -> Tensor:
    """The same random orthonormal matrix (d, q) for every sketch of these sizes."""
    draw = torch.Generator().manual_seed(1_000 * width + columns)
    return torch.linalg.qr(torch.randn(width, columns, generator=draw, dtype=torch.float64, device="cpu")).Q
