import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from anchorlora import Subspace
from anchorlora.errors import NotFinite

EPS = torch.finfo(torch.float64).eps


def random_basis(d, k, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, k, generator=draw, dtype=torch.float64)).Q.to(dtype)


shapes = st.tuples(st.integers(2, 60), st.integers(1, 20), st.integers(1, 9), st.integers(0, 10_000)).filter(lambda s: s[1] <= s[0])


@given(shapes)
def test_inside_and_outside_agree_with_dense_projectors(shape):
    d, k, n, seed = shape
    V = random_basis(d, k, seed)
    rows = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    tolerance = 20 * EPS * float(rows.norm()) * k
    assert torch.allclose(Subspace(V).outside(rows), rows @ oracle.projector(V), atol=tolerance, rtol=0)
    assert torch.allclose(Subspace(V).inside(rows), rows @ (V @ V.T), atol=tolerance, rtol=0)
    assert torch.allclose(Subspace(V).coordinates(rows), rows @ V, atol=tolerance, rtol=0)


@given(shapes)
def test_outside_twice_is_outside_once_and_kills_the_core(shape):
    d, k, n, seed = shape
    core = Subspace(random_basis(d, k, seed))
    rows = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    once = core.outside(rows)
    tolerance = 20 * EPS * float(rows.norm()) * k
    assert torch.allclose(core.outside(once), once, atol=tolerance, rtol=0)
    assert float(core.coordinates(once).norm()) <= tolerance


def test_a_basis_that_is_not_orthonormal_is_refused():
    with pytest.raises(ValueError, match="not orthonormal.*orthonormalise it first"):
        Subspace(torch.ones(6, 2))
    with pytest.raises(NotFinite, match="holds NaN or infinite values"):
        Subspace(torch.full((6, 1), float("nan")))


def test_a_basis_that_was_written_to_is_found_when_it_is_checked_again():
    core = Subspace(random_basis(30, 4))
    core.basis[0, 0] += 1e-2
    with pytest.raises(ValueError, match=r"\|V\^T V - I\| = .*e-0[23], allowed 1e-05"):
        core.check()


def test_a_half_precision_basis_is_refused():
    with pytest.raises(TypeError, match="float32 or float64, not torch.bfloat16"):
        Subspace(random_basis(8, 2).to(torch.bfloat16))


def test_joining_spans_every_part_and_counts_shared_directions_once():
    V = random_basis(30, 9)
    first, second = Subspace(V[:, :5]), Subspace(V[:, 3:9])
    union = Subspace.joining([first, second])
    assert union.k == 9
    for part in (first, second):
        assert float(union.outside(part.basis.T).norm()) < 1e-12


def test_joining_float32_copies_of_one_core_adds_no_direction():
    V = random_basis(50, 7)
    turned = V @ random_basis(7, 7, seed=3)
    assert Subspace.joining([Subspace(V.float()), Subspace(turned.float())]).k == 7
