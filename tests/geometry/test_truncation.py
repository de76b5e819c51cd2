"""The best approximation of lower rank against a dense SVD in float64, and the law it must keep: nothing of that rank is nearer."""

import pytest
import torch

from anchorlora.geometry import Factors, singular, truncated

EPS = torch.finfo(torch.float64).eps
SHAPES = [(30, 20, 12), (9, 40, 12), (40, 7, 12), (16, 16, 1)]  # d_out, d_in, m: also a layer narrower than the stack


def factors(d_out, d_in, m, scale=2.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    A, B = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((m, d_in), (d_out, m)))
    return Factors(A * torch.logspace(0, -3, m, dtype=torch.float64)[:, None], B, scale)


def dense(f):
    return f.scale * f.B.double() @ f.A.double()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_and_vectors_are_those_of_the_dense_matrix(shape):
    f = factors(*shape)
    left, values, right = singular(f.product())
    expected = torch.linalg.svdvals(dense(f))[: len(values)]
    assert torch.allclose(values, expected, rtol=0, atol=100 * EPS * float(expected[0]))
    assert torch.allclose(left * values @ right, dense(f), rtol=0, atol=100 * EPS * float(expected[0]))


@pytest.mark.parametrize("scale", [2.0, 0.25, -0.5])
@pytest.mark.parametrize("rank", [1, 3, 7, 12, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_error_is_what_the_dropped_singular_values_leave(shape, rank, scale):
    f = factors(*shape, scale=scale)
    best = truncated(f, rank)
    dropped = torch.linalg.svdvals(dense(f))[rank:]
    size = float(dense(f).norm())
    assert best.rank == rank
    assert best.scale == f.scale
    assert float((dense(best) - dense(f)).norm()) == pytest.approx(float(dropped.norm()), rel=1e-9, abs=100 * EPS * size)


def test_factors_are_balanced_and_what_is_not_needed_is_zero():
    best = truncated(factors(30, 20, 4), 6)
    assert float(best.A.norm()) == pytest.approx(float(best.B.norm()), rel=1e-12)
    assert not best.A[4:].any()
    assert not best.B[:, 4:].any()


@pytest.mark.parametrize("seed", range(5))
def test_no_random_neighbor_of_that_rank_is_nearer(seed):
    f, draw = factors(30, 20, 12, seed=seed), torch.Generator().manual_seed(100 + seed)
    best = truncated(f, 3)
    least = float((dense(best) - dense(f)).norm())
    for size in (1e-1, 1e-3):
        A = best.A * (1 + size * torch.randn(best.A.shape, generator=draw, dtype=torch.float64))
        assert float((dense(Factors(A, best.B, best.scale)) - dense(f)).norm()) > least


@pytest.mark.parametrize("f", [factors(8, 6, 2, scale=0.0), Factors(torch.randn(2, 6), torch.zeros(8, 2), 4.0)])
def test_an_update_of_nothing_stays_nothing(f):
    best = truncated(f, 3)
    assert (best.A.shape, best.B.shape, best.scale) == ((3, 6), (8, 3), f.scale)
    assert not dense(best).any()


def test_a_rank_below_one_is_refused():
    with pytest.raises(ValueError, match="the rank of LoRA factors is 1 or more, not 0"):
        truncated(factors(8, 6, 2), 0)
