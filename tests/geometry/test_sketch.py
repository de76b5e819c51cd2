"""A sketch of second moments against the dense matrix in float64: its bound, its order, and where it is exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorlora.errors import InvalidValue
from anchorlora.geometry import GrowingRows, SketchedRows, SpikedCovariance, growing_rows

EPS = torch.finfo(torch.float64).eps


def rows_of(n, d, decay, seed):
    """Rows whose coordinates, in a basis of their own, decay by a power."""
    draw = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(d, d, generator=draw, dtype=torch.float64)).Q
    return torch.randn(n, d, generator=draw, dtype=torch.float64) * torch.arange(1, d + 1, dtype=torch.float64) ** -decay @ basis.T


@settings(max_examples=12)
@given(st.integers(90, 140), st.integers(4, 16), st.integers(1, 300), st.floats(0.0, 3.0), st.integers(0, 99))
def test_it_is_never_above_the_matrix_and_misses_little_more_than_the_best(d, rank, n, decay, seed):
    rows, sketch = rows_of(n, d, decay, seed), SketchedRows(d, columns=3 * rank)
    for part in rows.split(37):
        sketch.add(part)
    exact = rows.T @ rows
    true = torch.linalg.eigvalsh(exact).flip(0)
    found = sketch.spectrum(rank)
    m = found.directions.shape[1]
    values = torch.diff(found.energy[:m], prepend=found.energy.new_zeros(1)) * sketch.total
    slack = 1e3 * EPS * float(true[0])
    assert (values <= true[:m] + slack).all()
    assert float((found.directions.T @ found.directions - torch.eye(m)).abs().max()) <= 100 * EPS * d
    best = float(true[m:].sum())
    missed = float(true.sum() - values.sum())
    assert missed <= 2 * (1 + rank / (3 * rank - rank - 1)) * best + d * slack  # the bound of the mean, twice
    if n <= 3 * rank:  # of a rank that the sketch holds
        assert torch.allclose(values, true[:m], rtol=1e-6, atol=1e3 * slack)


def test_narrow_rows_stay_exact_and_wide_ones_are_sketched():
    assert isinstance(growing_rows(1024, 64, device="cpu"), GrowingRows)
    wide = growing_rows(1536, 64, device="cpu")
    assert isinstance(wide, SketchedRows)
    rows = rows_of(2000, 1536, 1.0, 3).float()
    exact = GrowingRows()
    for part in rows.split(300):
        wide.add(part)
        exact.add(part)
    one, other = (SpikedCovariance.of(each, 64) for each in (wide, exact))
    assert one.trace == pytest.approx(other.trace, rel=1e-9)
    overlap = torch.linalg.svdvals(one.directions[:, :8].T @ other.directions[:, :8])
    assert float(overlap.min()) > 0.99
    assert float(one.values.sum()) > 0.97 * float(other.values.sum())


def test_nothing_or_nan_is_refused():
    with pytest.raises(InvalidValue, match="all zero"):
        SketchedRows(8, 4).spectrum(2)
    with pytest.raises(InvalidValue, match="NaN"):
        SketchedRows(8, 4).add(torch.full((1, 8), float("nan")))
