import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anchorlora.geometry import GrowingRows, Spectrum, spectrum

EPS = torch.finfo(torch.float64).eps


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
    assert float((V.T @ V - torch.eye(64, dtype=torch.float64)).norm()) < 64 * 8 * EPS


def test_row_order_and_orthogonal_mixing_of_rows_do_not_matter():
    rows = decaying(40, 60)
    mixed = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64)).Q @ rows[torch.randperm(40)]
    V, W = (Spectrum.of(x, at_most=6).directions for x in (rows, mixed))
    assert torch.allclose(V, W, atol=1e-9)  # signs are fixed, so the directions themselves agree
    assert bool((V.amax(dim=0) == V.abs().amax(dim=0)).all()), "the largest component of each is positive"


def test_the_first_columns_of_a_wide_basis_are_the_core():
    rows = decaying(100, 80)
    core, wide = (Spectrum.of(rows, at_most=64).leading(k).basis for k in (12, 64))
    assert torch.equal(core, wide[:, :12])
    assert core.is_contiguous(), "safetensors writes no other tensor"


def test_energy_exactly_at_the_threshold_counts_as_reached():
    rows = torch.diag(torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))  # energies 1/2, 5/8, ..
    assert Spectrum.of(rows, at_most=5).k_star(0.5) == 1
    assert Spectrum.of(rows, at_most=5).k_star(0.5 + 1e-9) == 2


def test_no_direction_is_invented_beyond_the_rank_of_the_rows():
    rows = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 40, dtype=torch.float64)
    assert Spectrum.of(rows, at_most=20).directions.shape == (40, 3)


class Decomposed(list):
    """Sizes of the matrices that are decomposed, in order."""

    def __init__(self, monkeypatch):
        inner = spectrum._strongest
        monkeypatch.setattr(spectrum, "_strongest", lambda gram, rows: self.append(len(gram)) or inner(gram, rows))


def refuse_unlike(found, rows, k):
    """The first k directions and all energies of a spectrum against a dense float64 SVD.

    A Gram matrix is off by rounding, eps |X|^2; directions turn by that over the gap of squared singular values (Davis and Kahan).
    """
    V, _, _ = oracle.core(rows, energy=1.0, at_least=k, at_most=k)
    squares = torch.linalg.svdvals(rows.double()).square()
    rounding = sum(rows.shape) * EPS * float(squares.sum())
    assert sine(found.directions[:, :k], V) < rounding / float(squares[k - 1] - squares[k])
    shares = squares.cumsum(0) / squares.sum()
    assert float((found.energy - shares[: len(found.energy)]).abs().max()) < sum(rows.shape) * EPS


@pytest.mark.parametrize(("n", "d"), [(300, 24), (24, 300), (48, 48)])
def test_only_the_smaller_side_is_decomposed(n, d, monkeypatch):
    sizes, rows = Decomposed(monkeypatch), decaying(n, d, dominant=3.0)
    refuse_unlike(Spectrum.of(rows, at_most=10), rows, 10)
    assert sizes == [min(n, d)]


def test_where_both_sides_are_long_chunks_carry_the_strongest_directions_on(monkeypatch):
    monkeypatch.setattr(spectrum, "SIDE", 128)
    monkeypatch.setattr(spectrum, "CARRIED", 64)
    sizes, draw = Decomposed(monkeypatch), torch.Generator().manual_seed(1)
    rows = torch.cat([decaying(100, 150, seed)[torch.randperm(100, generator=draw)] for seed in range(5)])
    V, _, retained = oracle.core(rows, energy=1.0, at_least=10, at_most=10)
    found = Spectrum.of(rows, at_most=10)
    assert found.rows == 500
    assert max(sizes) == 128 + 64
    squares = torch.linalg.svdvals(rows).square()
    assert 0 < found.dropped < 1e-4
    assert sine(found.directions[:, :5], V[:, :5]) < found.dropped * squares.sum() / (squares[4] - squares[5])
    assert retained - 10 * found.dropped <= found.retained(10) <= retained


def test_two_hundred_tasks_of_a_narrow_layer_stay_exact_and_cost_what_the_second_does(monkeypatch):
    monkeypatch.setattr(spectrum, "SIDE", 24)  # the widest layer that stays exact
    sizes, rows, grown = Decomposed(monkeypatch), decaying(200 * 16, 24, dominant=3.0), GrowingRows(keep=12)
    held = []
    for part in rows.split(16):
        grown.add(part)
        found = grown.spectrum(12)
        held.append(sum(p.numel() for p in grown.parts) + (grown.moment.numel() if grown.moment is not None else 0))
    assert sizes == [16] + 199 * [24]
    assert held == [16 * 24] + 199 * [24 * 24]
    assert found.dropped == 0.0
    assert found.rows == 3200
    refuse_unlike(found, rows, 10)


@pytest.mark.parametrize("kinds", [1, 3])
def test_two_hundred_tasks_of_a_wide_layer_cost_the_same_and_lose_no_more_than_they_say(kinds, monkeypatch):
    """Exact up to SIDE rows. Beyond, X^T X = what is held + E with 0 <= v^T E v <= dropped |X|^2 for every unit v, so that
    energies are too small by at most k dropped, and so is what the found directions hold of the rows."""
    monkeypatch.setattr(spectrum, "SIDE", 64)
    sizes, grown = Decomposed(monkeypatch), GrowingRows(keep=40)
    rows = torch.cat([decaying(16, 96, task % kinds, dominant=2.0) for task in range(200)])
    rows += 0.01 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    held = []
    for number, part in enumerate(rows.split(16), 1):
        grown.add(part)
        found = grown.spectrum(12)
        held.append(sum(p.numel() for p in grown.parts))
        if number <= 4:
            refuse_unlike(found, rows[: 16 * number], 10)
            assert found.dropped == 0.0
    assert sizes == [16, 32, 48, 64] + [80] + 195 * [40 + 16]
    assert held[4:] == 196 * [40 * 96]
    shares = torch.linalg.svdvals(rows).square().cumsum(0) / rows.square().sum()
    assert 0 < found.dropped < 0.1
    for k in (1, 4, 12):
        inside = float((rows @ found.directions[:, :k]).square().sum() / rows.square().sum())
        slack = 16 * number * EPS
        assert shares[k - 1] - k * found.dropped - slack <= found.retained(k) <= inside + slack
        assert inside <= shares[k - 1] + slack


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_refused(bad):
    rows = torch.randn(6, 5)
    rows[2, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        Spectrum.of(rows, at_most=2)


def test_rows_of_zeros_are_refused():
    with pytest.raises(ValueError, match="all zero"):
        Spectrum.of(torch.zeros(6, 5), at_most=2)


@pytest.mark.parametrize(("carried", "keep"), [(16, 8), (5, 5)])
def test_parts_of_many_rows_and_of_few_may_follow_each_other(monkeypatch, carried, keep):
    """Of rank 5, so that nothing is ever dropped and all stays exact, however rows are merged."""
    monkeypatch.setattr(spectrum, "SIDE", 32)
    monkeypatch.setattr(spectrum, "CARRIED", carried)
    draw = torch.Generator().manual_seed(2)
    rows = torch.randn(600, 5, generator=draw, dtype=torch.float64) @ torch.randn(5, 80, generator=draw, dtype=torch.float64)
    grown = GrowingRows(keep=keep)
    for part in rows.split([10, 200, 7, 300, 3, 80]):
        grown.add(part)
    found = grown.spectrum(5)
    assert found.dropped == 0.0
    refuse_unlike(found, rows, 5)


@pytest.mark.parametrize("parts", [[80], [16] * 5])
def test_what_merges_drop_is_a_fraction_of_the_energy_whatever_the_unit_of_the_rows(monkeypatch, parts):
    """Powers of two change no rounding, so the fractions are equal bit for bit; one merge drops exactly its strongest direction."""
    monkeypatch.setattr(spectrum, "SIDE", 16)
    monkeypatch.setattr(spectrum, "CARRIED", 8)
    rows, found = decaying(80, 60, dominant=2.0), []
    for unit in (2.0**-6, 1.0, 2.0**6):
        grown = GrowingRows(keep=8)
        for part in (unit * rows).split(parts):
            grown.add(part)
        found.append(grown.spectrum(8).dropped)
    assert found[0] > 0
    assert found == 3 * found[:1]


def test_one_merge_drops_the_energy_of_the_strongest_direction_beyond_those_it_keeps(monkeypatch):
    monkeypatch.setattr(spectrum, "SIDE", 16)
    rows, grown = decaying(20, 60, dominant=2.0), GrowingRows(keep=8)
    for part in (rows, 1e-3 * rows[:1]):  # what the last merge drops counts once more rows arrive
        grown.add(part)
    squares = torch.linalg.svdvals(rows).square()
    assert grown.spectrum(8).dropped == pytest.approx(float(squares[8] / squares.sum()), rel=1e-5)


def test_no_share_is_larger_than_one_however_the_energies_were_rounded():
    assert Spectrum(torch.eye(2), torch.tensor([0.5, 1.0 + 4 * EPS], dtype=torch.float64), 2).retained(2) == 1.0
