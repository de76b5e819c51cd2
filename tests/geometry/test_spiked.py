"""Low rank plus identity, and folding, against dense float64 matrices."""

import pytest
import torch

from anchorlora import Subspace
from anchorlora.geometry import Factors, GrowingRows, SpikedCovariance, folded

EPS = torch.finfo(torch.float64).eps


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grown(*parts):
    rows = GrowingRows()
    for part in parts:
        rows.add(part)
    return rows


def spiked(d, m, *, seed=0, n=200):
    """A spiked covariance of n rows with coordinates of unlike scale, and the dense matrix that it stands for."""
    rows = normal(n, d, seed=seed) * torch.logspace(0, -2, d, dtype=torch.float64)
    values, Q = torch.linalg.eigh(rows.T @ rows)
    values, Q = values.flip(0), Q.flip(1)
    tail = values[m:].mean() if m < d else values.new_zeros(())
    dense = Q[:, :m] @ torch.diag(values[:m] - tail) @ Q[:, :m].T + tail * torch.eye(d, dtype=torch.float64)
    return SpikedCovariance.of(grown(rows), m), dense


@pytest.mark.parametrize(("d", "m", "n"), [(24, 6, 200), (24, 6, 15), (10, 10, 40), (8, 30, 40)])
def test_strong_directions_stay_and_the_others_are_at_their_mean(d, m, n):
    M, dense = spiked(d, min(m, d), n=n) if m <= d else (SpikedCovariance.of(grown(normal(n, d)), m), normal(n, d).T @ normal(n, d))
    eye = torch.eye(d, dtype=torch.float64)
    size = float(dense.norm())
    assert float((M.times(eye) - dense).norm()) <= 1e3 * EPS * size
    assert float((M.root @ M.root.T + M.tail * eye - dense).norm()) <= 1e3 * EPS * size
    assert M.trace == pytest.approx(float(dense.trace()), rel=1e-12)
    root = M.power(eye, 0.5)
    assert float((root @ root - dense).norm()) <= 1e3 * EPS * size
    inverse = M.power(eye, -0.5, ridge=0.1)
    assert float((inverse @ (dense + 0.1 * eye) @ inverse - eye).norm()) <= 1e4 * EPS * d


def test_what_is_written_is_read_back_and_grows_by_the_next_rows():
    """The floor of what is remembered counts in every direction, also in those that become strong later."""
    M, dense = spiked(24, 6)
    again = SpikedCovariance.read(M.root.float(), torch.tensor(M.tail, dtype=torch.float64))
    assert float((again.times(torch.eye(24).double()) - dense).norm()) <= 1e-6 * float(dense.norm())
    later = normal(50, 24, seed=9)
    both = SpikedCovariance.of(grown(later, again.root.T), 8, floor=again.tail)
    exact = dense + later.T @ later
    values, Q = torch.linalg.eigh(exact)
    assert both.trace == pytest.approx(float(exact.trace()), rel=1e-6)
    assert torch.allclose(both.values, values.flip(0)[:8], rtol=1e-5)
    assert float((both.leading(8).basis.double().T @ Q.flip(1)[:, :8]).svd().S.min()) > 1 - 1e-6


def test_shares_and_their_bounds():
    M = SpikedCovariance(torch.eye(4).double()[:, :2], torch.tensor([6.0, 2.0]).double(), 1.0)
    assert (M.trace, M.retained(1), M.k_star(0.6), M.k_star(0.8), M.k_star(0.9)) == (10.0, 0.6, 1, 2, None)
    with pytest.raises(ValueError, match="3 directions are asked for and 2 are known"):
        M.leading(3)


def test_no_row_at_all_is_zero():
    M = SpikedCovariance.of(GrowingRows(width=5), 3, floor=0.5)
    assert (M.trace, len(M.values)) == (2.5, 0)


@pytest.fixture
def parts():
    d_out, d_in, m = 18, 30, 10
    C, dense_C = spiked(d_in, 8, seed=1)
    G, dense_G = spiked(d_out, 5, seed=2)
    factors = Factors(normal(m, d_in, seed=3), normal(d_out, m, seed=4), 2.0)
    keep = Subspace(torch.linalg.qr(normal(d_in, 3, seed=5)).Q)
    return factors, keep, (C, dense_C), (G, dense_G)


def half(M, ridge=0.0):
    values, Q = torch.linalg.eigh(M)
    return Q @ torch.diag((values.clamp(min=0) + ridge).sqrt()) @ Q.T


def test_a_fold_keeps_the_core_and_no_projection_of_its_rank_is_nearer(parts):
    """Against a search: projections onto R outputs that hold G^1/2 F V, the rest drawn at random and then improved by descent."""
    factors, keep, (C, dense_C), (G, dense_G) = parts
    rank, F = 6, factors.scale * factors.B @ factors.A
    found = folded(factors, rank, keep=keep, inputs=C, outputs=G)
    F2 = found.scale * found.B @ found.A
    assert found.rank == rank
    assert float(((F2 - F) @ keep.basis).norm()) <= 1e4 * EPS * float(F.norm())
    Gh, Ch = half(dense_G, 1e-2 * float(dense_G.trace()) / len(dense_G)), half(dense_C)
    ours = float((Gh @ (F2 - F) @ Ch).norm())
    held = torch.linalg.qr(Gh @ F @ keep.basis).Q
    Y = Gh @ F @ Ch
    others = []
    for seed in range(20):
        free = normal(len(Y), rank - held.shape[1], seed=100 + seed).requires_grad_()
        optimizer = torch.optim.Adam([free], lr=0.05)
        for _ in range(150):
            U = torch.linalg.qr(torch.cat([held, free], dim=1)).Q
            left = (Y - U @ (U.T @ Y)).norm()
            optimizer.zero_grad()
            left.backward()
            optimizer.step()
        others.append(float(left.detach()))
    assert ours <= min(others) * (1 + 1e-9)
    assert min(others) <= ours * 1.01, "the search is no match, so the comparison says nothing"


def test_without_metrics_and_core_a_fold_is_the_nearest_of_its_rank(parts):
    factors, *_ = parts
    F = factors.scale * factors.B @ factors.A
    found = folded(factors, 4)
    values = torch.linalg.svdvals(F)
    assert float((found.scale * found.B @ found.A - F).norm()) == pytest.approx(float(values[4:].norm()), rel=1e-9)


def test_a_fold_in_a_metric_is_nearer_in_it_than_one_without(parts):
    factors, keep, (C, dense_C), (G, dense_G) = parts
    F, Gh, Ch = factors.scale * factors.B @ factors.A, half(dense_G, 1e-2 * float(dense_G.trace()) / len(dense_G)), half(dense_C)

    def distance(found):
        return float((Gh @ (found.scale * found.B @ found.A - F) @ Ch).norm())

    assert distance(folded(factors, 6, keep=keep, inputs=C, outputs=G)) < 0.9 * distance(folded(factors, 6, keep=keep))


def test_factors_that_fit_are_not_touched_and_a_core_that_does_not_is_refused(parts):
    factors, keep, *_ = parts
    assert folded(factors, 10, keep=keep) is factors
    with pytest.raises(ValueError, match="the response on 3 protected directions must be kept, and a fold to rank 2 has no room"):
        folded(factors, 2, keep=keep)


def test_no_metric_knows_anything_yet(parts):
    """Metrics that are zero, as of an expert that no token has reached, count as none."""
    factors, keep, *_ = parts
    nothing = SpikedCovariance.of(GrowingRows(width=30), 3), SpikedCovariance.of(GrowingRows(width=18), 3)
    found = folded(factors, 6, keep=keep, inputs=nothing[0], outputs=nothing[1])
    expected = folded(factors, 6, keep=keep)
    assert torch.allclose(found.B @ found.A, expected.B @ expected.A)
