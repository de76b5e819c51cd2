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
    with pytest.raises(ValueError, match="not orthonormal.*orthonormalize it first"):
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


def test_joining_one_after_the_other_keeps_what_is_there_and_adds_only_what_is_new():
    V = random_basis(30, 9)
    first = Subspace.joining([Subspace(V[:, :5])])
    both = first.joined(Subspace(V[:, 3:9]))
    assert torch.equal(both.basis[:, :5], first.basis)
    assert both.k == 9
    assert both.joined(Subspace(V[:, 2:7].float())).k == 9, "a float32 copy of what is there adds nothing"


def test_joining_what_lies_nearly_inside_again_and_again_stays_orthonormal():
    """Of a direction of which 1e-5 is new, five digits are lost, and more where the basis before has lost some."""
    V, union = random_basis(60, 50), None
    for i in range(0, 50, 2):
        parts = V[:, i : i + 2] @ torch.tensor([[1.0, 1.0], [0.0, 1e-5]], dtype=torch.float64)
        for column in (parts[:, :1], parts[:, 1:]):
            new = Subspace(column / column.norm())
            union = union.joined(new) if union else Subspace.joining([new])
    assert union.k == 50
    eps = torch.finfo(torch.float64).eps
    assert float((union.basis.T @ union.basis - torch.eye(50, dtype=torch.float64)).norm()) < 60 * 50 * eps
    assert float(union.outside(V.T).norm()) < 60 * 50 * eps / 1e-5


def test_columns_that_were_found_sound_before_are_not_looked_at_again():
    V = random_basis(30, 9)
    V[:, 0] *= 2
    assert Subspace(V[:, 1:], sound=8).k == 8
    Subspace(V, sound=9)
    with pytest.raises(ValueError, match="not orthonormal"):
        Subspace(V, sound=0)
    V[:, 8] *= 2
    with pytest.raises(ValueError, match="not orthonormal"):
        Subspace(V, sound=8)


def test_joining_float32_copies_of_one_core_adds_no_direction():
    V = random_basis(50, 7)
    turned = V @ random_basis(7, 7, seed=3)
    assert Subspace.joining([Subspace(V.float()), Subspace(turned.float())]).k == 7
