import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anchorlora import Subspace
from anchorlora.geometry import Factors, Product, Rounding, Spectrum, singular, truncated

EPS = torch.finfo(torch.float64).eps
dims = st.tuples(st.integers(3, 40), st.integers(3, 40), st.integers(1, 6), st.integers(0, 999))


def pair(d_out, d_in, r, seed=0, step=0.3, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    A0, dA = (torch.randn(r, d_in, generator=draw, dtype=torch.float64) for _ in range(2))
    B0, dB = (torch.randn(d_out, r, generator=draw, dtype=torch.float64) for _ in range(2))
    anchor = Factors(A0.to(dtype), B0.to(dtype), 4.0)
    return Factors((A0 + step * dA).to(dtype), (B0 + step * dB).to(dtype), 4.0), anchor


def dense(now, anchor):
    return oracle.change(now.A, now.B, anchor.A, anchor.B, now.scale)


@given(dims)
def test_the_change_is_the_difference_of_the_products_and_the_sum_of_its_three_paths(sizes):
    now, anchor = pair(*sizes)
    change, expected = now.since(anchor), dense(now, anchor)
    tolerance = 100 * EPS * float(expected.norm() + 1)
    assert torch.allclose(change.left @ change.right, expected, atol=tolerance, rtol=0)
    paths = sum(p.left @ p.right for p in now.paths(anchor))
    assert torch.allclose(paths, expected, atol=tolerance, rtol=0)


@given(dims)
def test_norm_and_square_agree_with_the_dense_matrix(sizes):
    now, anchor = pair(*sizes)
    change, expected = now.since(anchor), dense(now, anchor)
    assert float(change.norm()) == pytest.approx(float(expected.norm()), rel=1e-11)
    assert float(change.square()) == pytest.approx(float(expected.norm()) ** 2, rel=1e-9)


@given(dims, st.integers(1, 3))
def test_pythagoras_on_and_off_a_core(sizes, k):
    now, anchor = pair(*sizes)
    core = Subspace(torch.linalg.qr(torch.randn(sizes[1], k, dtype=torch.float64)).Q)
    change = now.since(anchor)
    squares = float(change.on(core).norm()) ** 2 + float(change.off(core).norm()) ** 2
    assert squares == pytest.approx(float(change.norm()) ** 2, rel=1e-10)


@settings(max_examples=20)
@given(dims, st.floats(0.1, 10))
def test_rescaled_factors_are_the_same_change(sizes, c):
    now, anchor = pair(*sizes)
    same = Factors(now.A / c, now.B * c, now.scale)
    assert float(same.since(anchor).norm()) == pytest.approx(float(now.since(anchor).norm()), rel=1e-9)


def test_zero_displacement_gives_exactly_zero():
    _, anchor = pair(9, 7, 3)
    assert float(anchor.copy().since(anchor).norm()) == 0.0


@pytest.mark.parametrize("step", [1e-1, 1e-4, 1e-7])
def test_a_small_change_of_float32_factors_keeps_its_digits(step):
    """Subtracting two float32 products would be wrong by half at 1e-7; from displacements nothing is lost."""
    now, anchor = pair(64, 48, 8, step=step, dtype=torch.float32)
    expected = dense(now, anchor)  # float64 from the stored numbers
    change = now.since(anchor)
    error = float((change.left @ change.right - expected).norm() / expected.norm())
    assert error < 64 * EPS / step
    subtracted = now.scale * (now.B @ now.A - anchor.B @ anchor.A)
    assert float((subtracted - expected).norm() / expected.norm()) == pytest.approx(5e-8 / step, rel=0.2)


def test_a_rank_that_grew_is_compared_by_stacking_both_products():
    now, anchor = pair(20, 15, 4)
    grown = Factors(torch.cat([now.A, now.A[:2]]), torch.cat([now.B, now.B[:, :2]], dim=1), 2.0)
    expected = 2.0 * grown.B @ grown.A - 4.0 * anchor.B @ anchor.A
    change = grown.since(anchor)
    assert torch.allclose(change.left @ change.right, expected, atol=1e-12)


def test_stacked_blocks_are_recognized_only_when_the_earlier_rows_are_unchanged():
    now, earlier = pair(20, 15, 4)
    stacked = Factors(torch.cat([earlier.A, now.A]), torch.cat([earlier.B, now.B], dim=1), 4.0)
    newer = stacked.grown_from(earlier)
    assert newer is not None
    assert torch.equal(newer.A, now.A)
    assert torch.equal(newer.B, now.B)
    touched = Factors(stacked.A + 1e-9, stacked.B, 4.0)
    assert touched.grown_from(earlier) is None
    assert now.grown_from(earlier) is None
    assert earlier.grown_from(earlier) is None, "nothing is newer"
    assert Factors(stacked.A, stacked.B, 2.0).grown_from(earlier) is None, "another scale is another function"


def test_stacked_blocks_are_recognized_where_the_scale_was_rounded_to_its_neighbor():
    """alpha / r, written to a file and read again."""
    now, earlier = pair(20, 15, 4)
    stacked = Factors(torch.cat([earlier.A, now.A]), torch.cat([earlier.B, now.B], dim=1), math.nextafter(256.0, 0.0))
    assert stacked.grown_from(Factors(earlier.A, earlier.B, 256.0)) is not None


@given(dims, st.integers(0, 3), st.floats(0.1, 10))
def test_padded_and_rescaled_factors_are_the_same_product(sizes, more, scale):
    now, _ = pair(*sizes)
    padded, rescaled = now.padded(now.rank + more), now.scaled_to(scale)
    expected = 4.0 * now.B @ now.A
    assert (padded.rank, padded.scale) == (now.rank + more, 4.0)
    assert torch.equal(padded.A[: now.rank], now.A), "the zeros stand at the end"
    assert torch.allclose(padded.scale * padded.B @ padded.A, expected, rtol=0, atol=100 * EPS * float(expected.norm()))
    assert rescaled.scale == scale
    error = float((scale * rescaled.B.double() @ rescaled.A.double() - expected).norm())
    assert error <= 4 * torch.finfo(torch.float32).eps * 4.0 * float(now.A.norm() * now.B.norm())  # both are stored in float32


@given(dims)
def test_a_transposed_or_thinned_product_is_the_same_matrix_up_to_what_it_says(sizes):
    now, anchor = pair(*sizes)
    change, expected = now.since(anchor), dense(now, anchor)
    tolerance = 100 * EPS * float(expected.norm() + 1)
    transposed, thinned = change.transposed(), change.thinned()
    assert torch.allclose(transposed.left @ transposed.right, expected.T, atol=tolerance, rtol=0)
    assert thinned.left.shape[0] == min(change.left.shape), "no larger than the inner size"
    dense_thinned = thinned.left @ thinned.right
    assert torch.allclose(
        dense_thinned.T @ dense_thinned, expected.T @ expected, atol=tolerance * float(expected.norm() + 1), rtol=0
    )


def test_what_is_computed_from_live_parameters_holds_no_graph():
    now, anchor = pair(12, 9, 3, dtype=torch.float32)
    live = Factors(torch.nn.Parameter(now.A), torch.nn.Parameter(now.B), now.scale)
    found = [live.copy(), live.scaled_to(2.0), live.scaled_to(4.0), truncated(live, 2), live.since(anchor), *live.paths(anchor)]
    tensors = [t for each in found for t in vars(each).values() if isinstance(t, torch.Tensor)]
    assert len(tensors) == 2 * len(found)
    assert not any(t.requires_grad for t in [*tensors, *singular(live.product()), live.product().norm()])


CHECKED = {
    Factors: (torch.ones(2, 3), torch.ones(4, 2), 1.0),
    Product: (torch.ones(4, 2), torch.ones(2, 3)),
    Subspace: (torch.eye(3),),
    Spectrum: (torch.eye(3), torch.ones(3), 3),
}


@pytest.mark.parametrize("kind", CHECKED)
def test_what_was_checked_cannot_be_replaced_and_is_told_apart_by_identity(kind):
    """A basis put in place of the one that was checked would protect nothing; tensors have no truth that `==` could return."""
    one, other = kind(*CHECKED[kind]), kind(*CHECKED[kind])
    with pytest.raises(FrozenInstanceError):
        setattr(one, next(iter(vars(one))), torch.zeros(3, 3))
    assert (one == one, one == other) == (True, False)


def test_the_norms_of_a_merge_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Rounding(1.0, 0.5).error = 0.0


def test_square_has_finite_gradients_where_a_block_starts_at_zero():
    A, B = torch.randn(3, 8, dtype=torch.float64), torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    Product(B, A).square().backward()
    assert torch.equal(B.grad, torch.zeros_like(B))


def test_the_square_has_the_gradient_of_the_dense_square():
    A = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    B = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    (mine,) = torch.autograd.grad(Product(B, A).square(), [A])
    (theirs,) = torch.autograd.grad(((B @ A) ** 2).sum(), [A])
    assert torch.allclose(mine, theirs, rtol=1e-12)


def test_rows_through_a_product_are_rows_through_the_dense_matrix():
    now, anchor = pair(12, 9, 3)
    rows = torch.randn(5, 9)
    assert torch.allclose(now.since(anchor).of(rows), rows.double() @ dense(now, anchor).T, atol=1e-12)


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"A \(3, 8\).*B \(6, 2\)"):
        Factors(torch.zeros(3, 8), torch.zeros(6, 2), 1.0)
    with pytest.raises(ValueError, match=r"A \(2, 3, 8\)"):
        Factors(torch.zeros(2, 3, 8), torch.zeros(6, 2), 1.0)
    with pytest.raises(ValueError, match="different layers"):
        pair(6, 8, 2)[0].since(pair(6, 9, 2)[0])
