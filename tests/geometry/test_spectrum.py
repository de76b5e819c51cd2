import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anchorlora import Spectrum


def decaying(n, d, seed=0, *, dominant=30.0):
    """Rows with one dominant direction and a power-law tail, as language models have them."""
    draw = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(n, min(n, d), generator=draw, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(d, min(n, d), generator=draw, dtype=torch.float64)).Q
    sigma = torch.arange(1, min(n, d) + 1, dtype=torch.float64) ** -1.0
    sigma[0] = dominant
    return left * sigma @ right.T


def sine(V, W):
    """Sine of the largest angle between two subspaces of equal dimension."""
    return float(torch.linalg.norm(V - W @ (W.T @ V), ord=2))


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 80), st.integers(4, 90), st.integers(0, 1000), st.floats(0.5, 0.999))
def test_core_and_rank_agree_with_a_dense_svd(n, d, seed, energy):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    V, k_star, retained = oracle.core(rows, energy=energy, at_least=1, at_most=min(n, d))
    spectrum = Spectrum.of(rows, at_most=min(n, d))
    assert spectrum.k_star(energy) == k_star
    assert spectrum.retained(k_star) == pytest.approx(retained, abs=1e-12)
    assert sine(spectrum.leading(k_star).basis.double(), V) < 1e-5  # float32 storage and small gaps


def test_dominant_directions_do_not_hide_the_weak_ones():
    """A float32 Gram matrix would miss the angle by 0.2 here."""
    rows = decaying(256, 400, dominant=1000.0)
    V, _, _ = oracle.core(rows, energy=1.0, at_least=20, at_most=20)
    assert sine(Spectrum.of(rows, at_most=20).directions, V) < 1e-7


def test_directions_are_orthonormal_to_rounding_after_the_polish():
    V = Spectrum.of(decaying(256, 400, dominant=1000.0), at_most=64).directions
    assert float((V.T @ V - torch.eye(64, dtype=torch.float64)).norm()) < 64 * 8 * torch.finfo(torch.float64).eps


def test_row_order_and_orthogonal_mixing_of_rows_do_not_matter():
    rows = decaying(40, 60)
    mixed = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q @ rows[torch.randperm(40)]
    V, W = (Spectrum.of(x, at_most=6).directions for x in (rows, mixed))
    assert torch.allclose(V, W, atol=1e-9)  # signs are fixed, so the directions themselves agree


def test_the_first_columns_of_a_wide_basis_are_the_core():
    rows = decaying(100, 80)
    assert torch.equal(Spectrum.of(rows, at_most=64).leading(12).basis, Spectrum.of(rows, at_most=64).leading(64).basis[:, :12])


def test_energy_exactly_at_the_threshold_counts_as_reached():
    rows = torch.diag(torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))  # energies 1/2, 5/8, ..
    assert Spectrum.of(rows, at_most=5).k_star(0.5) == 1
    assert Spectrum.of(rows, at_most=5).k_star(0.5 + 1e-9) == 2


def test_no_direction_is_invented_beyond_the_rank_of_the_rows():
    rows = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 40, dtype=torch.float64)
    assert Spectrum.of(rows, at_most=20).directions.shape == (40, 3)


def test_more_rows_than_one_chunk_give_the_directions_of_a_dense_svd(monkeypatch):
    monkeypatch.setattr("anchorlora.geometry.spectrum.CHUNK", 128)
    monkeypatch.setattr("anchorlora.geometry.spectrum.CARRIED", 64)
    draw = torch.Generator().manual_seed(1)
    rows = torch.cat([decaying(100, 150, seed)[torch.randperm(100, generator=draw)] for seed in range(5)])
    V, _, retained = oracle.core(rows, energy=1.0, at_least=10, at_most=10)
    spectrum = Spectrum.of(rows, at_most=10)
    assert spectrum.rows == 500
    # the merges dropped squared singular values of at most 5 (1/65)^2 in all; the gap below the fifth direction is near 0.1
    assert sine(spectrum.directions[:, :5], V[:, :5]) < 5 * (1 / 65) ** 2 / 0.1
    assert spectrum.retained(10) == pytest.approx(retained, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_refused(bad):
    rows = torch.randn(6, 5)
    rows[2, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        Spectrum.of(rows, at_most=2)


def test_rows_of_zeros_are_refused():
    with pytest.raises(ValueError, match="all zero"):
        Spectrum.of(torch.zeros(6, 5), at_most=2)
