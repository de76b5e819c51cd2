"""The audit against dense float64: every matrix formed, every condition written out."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anchorlora import METHODS, Subspace
from anchorlora.geometry import Factors, singular_directions
from anchorlora.measurement.directions import Protected, row_space
from anchorlora.measurement.layers import Audited, Block, block_layer, weight_layer
from anchorlora.measurement.result import AuditResult


class Case:
    """One layer with a learned anchor: A_0, B_0, displacements of a given size, a core; all of it float64 unless told."""

    def __init__(self, seed=0, *, d_in=40, d_out=28, r=4, k=5, s=4.0, step=0.1, dtype=torch.float64):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.s, self.dtype = s, dtype
        self.A0, self.B0 = normal(r, d_in) / d_in**0.5, normal(d_out, r) / r**0.5
        self.dA, self.dB = step * normal(r, d_in) / d_in**0.5, step * normal(d_out, r) / r**0.5
        self.V = torch.linalg.qr(normal(d_in, k)).Q
        self.U = torch.linalg.qr(normal(d_out, min(k, d_out))).Q

    @property
    def core(self):
        return Subspace(self.V)

    def factors(self, A, B):
        return Factors(A.to(self.dtype), B.to(self.dtype), self.s)

    def audit(self, *, dA=None, dB=None, A0=None, B0=None, saved=True):
        A0, B0 = (self.A0 if A0 is None else A0), (self.B0 if B0 is None else B0)
        start = self.factors(A0, B0)
        now = self.factors(A0 + (self.dA if dA is None else dA), B0 + (self.dB if dB is None else dB))
        return audit_of(Block(now, start if saved else None), self.core)


def result(audited, storage="float32"):
    return AuditResult("before", "after", "adapters", "the cores", storage, audited, ())


def audit_of(block, core):
    return Audited.of({"layer": block_layer([block], Protected(core))})


def outside(rows, V):
    return rows @ oracle.projector(V)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    d_in=st.integers(6, 60),
    d_out=st.integers(3, 60),
    r=st.integers(1, 8),
    k=st.integers(1, 6),
    step=st.sampled_from([1.0, 1e-2, 1e-4, 1e-7]),
    c=st.sampled_from([1.0, 1e-3, 7.3, 1e4]),
)
def test_every_number_agrees_with_dense_float64_also_for_rescaled_factors_and_tiny_changes(seed, d_in, d_out, r, k, step, c):
    case = Case(seed, d_in=d_in, d_out=d_out, r=r, k=k, step=step)
    A0, B0, A, B = case.A0 / c, case.B0 * c, (case.A0 + case.dA) / c, (case.B0 + case.dB) * c
    core, left = case.core, Subspace(case.U)
    found = Audited.of({"l": block_layer([Block(Factors(A, B, 4.0), Factors(A0, B0, 4.0))], Protected(core, left))}).overall
    dA, dB = A - A0, B - B0
    dense = 4.0 * (B0 @ dA + dB @ A)  # float64 has no digits left for a difference of products at 1e-7
    expected = oracle.drift([(dense, case.V)])
    for name in ("d_eff", "d_old", "d_new", "rho", "chance"):
        assert getattr(found.right, name) == pytest.approx(float(expected[name]), rel=1e-6), name
    written = oracle.drift([(dense.T, case.U)])
    assert found.left.rho == pytest.approx(float(written["rho"]), rel=1e-6)
    ratios = {
        "displacement": (dA @ case.V).norm() / dA.norm(),
        "state": (A @ case.V).norm() / A.norm(),
        "delta_b": dB.norm() / max(B.norm(), B0.norm()),
    }
    for name, value in ratios.items():
        assert found.conditions[name].value == pytest.approx(float(value), rel=1e-6), name
    assert found.paths["displacement"] == pytest.approx(float((4 * B0 @ dA @ case.V).norm() / dense.norm()), rel=1e-6)
    assert found.paths["delta_b"] == pytest.approx(float((4 * dB @ A @ case.V).norm() / dense.norm()), rel=1e-6)


def test_layers_add_up_in_squares():
    cases = {f"layer{i}": Case(i, d_in=20 + i, k=3 + i) for i in range(3)}
    layers, dense = {}, []
    for name, case in cases.items():
        now = Factors(case.A0 + case.dA, case.B0 + case.dB, 4.0)
        layers[name] = block_layer([Block(now, Factors(case.A0, case.B0, 4.0))], Protected(case.core))
        dense.append((oracle.change(now.A, now.B, case.A0, case.B0, 4.0), case.V))
    found, expected = Audited.of(layers), oracle.drift(dense)
    assert found.overall.right.rho == pytest.approx(float(expected["rho"]), rel=1e-9)
    assert found.overall.right.chance == pytest.approx(float(expected["chance"]), rel=1e-9)
    displaced = sum(float((c.dA @ c.V).square().sum()) for c in cases.values()) / sum(
        float(c.dA.square().sum()) for c in cases.values()
    )
    assert found.overall.conditions["displacement"].value == pytest.approx(displaced**0.5, rel=1e-9)


def test_blocks_of_a_layer_are_summed_and_still_ones_say_nothing():
    one, other = Case(1), Case(2)
    blocks = [Block(Factors(c.A0 + c.dA, c.B0 + c.dB, 4.0), Factors(c.A0, c.B0, 4.0)) for c in (one, other)]
    still = Block(Factors(one.A0, one.B0, 4.0), Factors(one.A0.clone(), one.B0.clone(), 4.0))
    found = Audited.of({"l": block_layer([*blocks, still], Protected(one.core))}).overall
    dense = sum(oracle.change(b.now.A, b.now.B, b.start.A, b.start.B, 4.0) for b in blocks)
    assert found.right.rho == pytest.approx(float(oracle.drift([(dense, one.V)])["rho"]), rel=1e-9)
    assert found.kind == "learned anchor"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_full_weights_agree_with_dense_float64_also_where_rows_are_read_in_pieces(dtype, monkeypatch):
    monkeypatch.setattr("anchorlora.measurement.layers.ROWS", 7)
    draw = torch.Generator().manual_seed(3)
    W0 = torch.randn(30, 22, generator=draw, dtype=torch.float64)
    W = (W0 + 1e-1 * torch.randn(30, 22, generator=draw, dtype=torch.float64)).to(dtype)
    W0 = W0.to(dtype)
    left, right = singular_directions(W0, 6)
    found = Audited.of({"l": weight_layer(W0, W, Protected(right, left))}).overall
    dW = W.double() - W0.double()
    for drift, matrix, basis in ((found.right, dW, right.basis), (found.left, dW.T, left.basis)):
        expected = oracle.drift([(matrix, basis)])
        for name in ("d_eff", "d_old", "d_new", "rho", "chance"):
            assert getattr(drift, name) == pytest.approx(float(expected[name]), rel=1e-9), name
    floor = torch.finfo(dtype).eps / 2 / 3**0.5 * float(W.double().norm()) * (6 / 22) ** 0.5 / float(dW.norm())
    assert found.right.rho_floor == pytest.approx(floor, rel=1e-9)


@pytest.mark.parametrize("shape", [(9, 14), (14, 9), (10, 10)])
def test_singular_directions_are_those_of_the_svd(shape):
    W = torch.randn(*shape, dtype=torch.float64)
    left, right = singular_directions(W, 4)
    U, _, Vt = torch.linalg.svd(W, full_matrices=False)
    assert torch.allclose(left.basis @ left.basis.T, U[:, :4] @ U[:, :4].T, atol=1e-10)
    assert torch.allclose(right.basis @ right.basis.T, Vt[:4].T @ Vt[:4], atol=1e-10)
    with pytest.raises(ValueError, match="rank 9 has no 10 leading|rank 10 has no 11 leading"):
        singular_directions(W, min(shape) + 1)


def test_a_row_space_holds_its_rows_and_counts_equal_ones_once():
    A = torch.randn(3, 12, dtype=torch.float64)
    space = row_space([A, A, torch.randn(2, 12, dtype=torch.float64)])
    assert space.k == 5
    assert float(space.outside(A).norm()) <= 12 * torch.finfo(torch.float64).eps * float(A.norm())


PRESERVED = {
    "the displacement from a learned anchor with B frozen": ("displacement", lambda c: c.audit(dA=outside(c.dA, c.V), dB=0 * c.dB)),
    "the state of a block that began at zero": (
        "state",
        lambda c: c.audit(A0=outside(c.A0, c.V), dA=outside(c.dA, c.V), B0=0 * c.B0),
    ),
    "the state of a block whose start nobody saved": (
        "state",
        lambda c: c.audit(A0=outside(c.A0, c.V), dA=outside(c.dA, c.V), B0=0 * c.B0, saved=False),
    ),
    "the state of a learned block that never read the core": (
        "state",
        lambda c: c.audit(A0=outside(c.A0, c.V), dA=outside(c.dA, c.V)),
    ),
}
VIOLATED = {
    "both factors of a learned anchor": ("both factors moved", lambda c: c.audit()),
    "only the ΔB term": ('Freeze("B") is missing', lambda c: c.audit(dA=outside(c.dA, c.V))),
    "only the displacement": ('ProjectDisplacement("A") is missing', lambda c: c.audit(dB=0 * c.dB)),
    "a zero-output block that began on the core": (
        'Retract("A") before the first step is missing',
        lambda c: c.audit(B0=0 * c.B0, dA=outside(c.dA, c.V)),
    ),
    "a zero-output block that moved there": (
        "A moved inside V",
        lambda c: c.audit(A0=outside(c.A0, c.V), B0=0 * c.B0),
    ),
    "a block without a saved start": ("the start of A was not saved", lambda c: c.audit(B0=0 * c.B0, saved=False)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PRESERVED)
def test_what_is_preserved_is_said_to_be_preserved_by_its_condition(name, dtype):
    by, make = PRESERVED[name]
    found = make(Case(dtype=dtype))
    assert (found.overall.status, found.overall.preserved_by) == ("preserved", by)
    assert result(found).verdict.startswith("Protected: rho is")
    assert result(found).advice == "Keep the constraints that are in place."


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", VIOLATED)
def test_what_is_violated_gets_the_constraint_that_would_have_preserved_it(name, dtype):
    reason, make = VIOLATED[name]
    found = make(Case(dtype=dtype))
    assert (found.overall.status, found.overall.preserved_by) == ("violated", None)
    said = result(found).advice
    assert reason in said
    method = "o-lora-hard" if "zero-output" in name or "start" in name else "sfor"
    assert f"(method {method})" in said
    alternative = "rank-split" if method == "sfor" else "sensitive-core"
    assert f"With examples of the old tasks, {alternative}" in said
    assert "Without any old data, anchorlora train --keep self" in said
    named = {name for name in METHODS if re.search(rf"(?<![\w-]){name}(?![\w-])", said)}
    assert {method, alternative, "oplora"} <= named
    assert all(METHODS[name].preserves.response for name in named - {"oplora"})
    assert result(found).verdict.startswith("Not protected")


def test_the_advice_protects_what_it_is_given_for():
    """The rule, closed: what was violated is trained again under the advised constraints, and the audit finds it preserved."""
    from anchorlora import Freeze, ProjectDisplacement, Retract, protect
    from toys import anchor_of, optimizer_for, train

    for fresh, constraints, by in (
        (False, [Freeze("B"), ProjectDisplacement("A")], "displacement"),
        (True, [Retract("A"), ProjectDisplacement("A")], "state"),
    ):
        for held, status in (([], "violated"), (constraints, "preserved")):
            anchor = anchor_of(fresh=fresh)
            optimizer = optimizer_for(anchor, "adamw")
            with protect(optimizer, anchor, held):
                train(anchor, optimizer, 50)
            found = Audited.of({s.name: block_layer([Block(s.current, s.start)], Protected(s.core)) for s in anchor.layers})
            assert found.overall.status == status
            assert found.overall.preserved_by == (by if held else None)


def test_nothing_that_moved_is_unmoved_and_protected():
    case = Case()
    found = audit_of(Block(case.factors(case.A0, case.B0), case.factors(case.A0, case.B0)), case.core)
    assert (found.overall.status, found.overall.kind, found.overall.right.rho) == ("unmoved", "unmoved", None)
    assert result(found).verdict == "Nothing moved."


def test_a_change_of_the_size_of_rounding_is_not_called_protected():
    case = Case(dtype=torch.bfloat16, step=2e-3)
    assert case.audit().overall.status == "unresolved"
    assert result(case.audit(), "bfloat16").verdict.startswith("Unresolved: rho is")
    case = Case(dtype=torch.bfloat16, step=10.0, d_in=400)
    assert case.audit(dA=outside(case.dA, case.V), dB=0 * case.dB).overall.status == "preserved"
    assert case.audit().overall.status == "violated"


def test_blocks_of_another_rank_are_compared_by_their_products():
    case, wider = Case(r=4), Case(5, r=6)
    found = audit_of(Block(wider.factors(wider.A0, wider.B0), case.factors(case.A0, case.B0)), case.core).overall
    dense = 4.0 * (wider.B0 @ wider.A0 - case.B0 @ case.A0)
    assert found.kind == "other rank"
    assert found.right.rho == pytest.approx(float(oracle.drift([(dense, case.V)])["rho"]), rel=1e-9)
    assert found.conditions["displacement"].preserved is None
    assert found.conditions["state"].preserved is False


def test_the_same_function_in_rescaled_factors_is_no_leak_of_any_size():
    case = Case(dtype=torch.float32)
    start = case.factors(case.A0, case.B0)
    found = audit_of(Block(Factors(start.A / 3, start.B * 3, 4.0), start), case.core).overall
    assert found.status in ("unresolved", "unmoved"), "what is left is rounding"


def test_directions_of_another_width_are_refused_by_name():
    with pytest.raises(ValueError, match="the core of q has width 40, but the layer reads 41 inputs"):
        Protected(Case().core).fits("q", d_in=41, d_out=3)
