import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
from anchorlora import Subspace
from anchorlora.errors import NotFinite
from anchorlora.geometry import singular_directions

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
    assert union.basis.is_contiguous(), "safetensors writes no other tensor"
    for part in (first, second):
        assert float(union.outside(part.basis.T).norm()) < 1e-12


def test_joining_one_after_the_other_keeps_what_is_there_and_adds_only_what_is_new():
    V = random_basis(30, 9)
    first = Subspace.joining([Subspace(V[:, :5])])
    both = first.joined(Subspace(V[:, 3:9]))
    assert torch.equal(both.basis[:, :5], first.basis)
    assert both.k == 9
    assert both.joined(Subspace(V[:, 2:7].float())).k == 9, "a float32 copy of what is there adds nothing"
    stored = Subspace(V[:, :5].float()).joined(Subspace(V[:, 3:9]))
    assert stored.basis.dtype == torch.float64
    assert stored.basis.is_contiguous()


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
        Subspace(V)
    V[:, 8] *= 2
    with pytest.raises(ValueError, match="not orthonormal"):
        Subspace(V, sound=8)


def test_joining_float32_copies_of_one_core_adds_no_direction():
    V = random_basis(50, 7)
    turned = V @ random_basis(7, 7, seed=3)
    assert Subspace.joining([Subspace(V.float()), Subspace(turned.float())]).k == 7


def test_another_type_is_another_subspace_and_the_same_type_is_this_one():
    core = Subspace(random_basis(12, 3))
    assert core.to() is core.to(dtype=torch.float64) is core.to(device="cpu") is core
    single = core.to(dtype=torch.float32)
    assert single.basis.dtype == torch.float32
    assert torch.equal(single.basis, core.basis.float())


def weight(d_out, d_in, rank, seed=0):
    """Singular values 1, 1/2, 1/3, .."""
    left, right = random_basis(d_out, rank, seed), random_basis(d_in, rank, seed + 1)
    return left / torch.arange(1, rank + 1) @ right.T


@pytest.mark.parametrize(("d_out", "d_in"), [(30, 12), (12, 30), (16, 16)])
def test_singular_directions_of_a_live_weight_are_those_of_a_dense_svd(d_out, d_in, monkeypatch):
    sizes, inner = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda gram: sizes.append(len(gram)) or inner(gram))
    W = weight(d_out, d_in, 12)
    U, _, right = torch.linalg.svd(W)
    for k in (1, 12):
        for found, expected in zip(singular_directions(torch.nn.Parameter(W), k), (U[:, :k], right[:k].T), strict=True):
            # a Gram matrix is off by eps |W|^2; directions turn by that over the gap of squared values (1/12^2 - 0 at the least)
            assert float((expected - found.inside(expected.T).T).norm()) < 60 * EPS * float(W.norm()) ** 2 * 12**2
            assert not found.basis.requires_grad
    assert sizes == 2 * [min(d_out, d_in)], "only the smaller side is decomposed"


def test_singular_directions_that_are_arbitrary_or_not_there_are_refused():
    W = weight(30, 12, 5)
    assert [each.k for each in singular_directions(W, 5)] == [5, 5]
    assert [each.k for each in singular_directions(1e-9 * W.T, 5)] == [5, 5], "rank does not depend on the unit"
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"rank 5 has no {k} leading singular directions"):
            singular_directions(W, k)
    with pytest.raises(ValueError, match="rank 0 has no 1 leading"):
        singular_directions(torch.zeros(4, 3), 1)
    W[2, 3] = float("nan")
    with pytest.raises(ValueError, match="the weight holds NaN or infinite values"):
        singular_directions(W, 1)
    with pytest.raises(ValueError, match="need a matrix"):
        singular_directions(torch.zeros(2, 3, 4), 1)
