import pytest
import torch

import oracle
from anchorlora import Factors, Scope, Site, Subspace, measure, protect
from anchorlora.diagnostics import held_out_drift, rho_on
from toys import optimizer_for, parameters, scope_of, train


def moved(seed=0, step=0.2, **kind):
    scope = scope_of(seed=seed, **kind)
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in parameters(scope):
            p.add_(step * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype))
    return scope


def dense(scope):
    layers = []
    for s in scope.sites:
        layers.append((oracle.change(s.current.A, s.current.B, s.anchor.A, s.anchor.B, s.current.scale), s.core.basis))
    return layers


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [{}, {"fresh": True}, {"dtype": torch.float64}])
def test_every_field_agrees_with_dense_float64(seed, kind):
    scope = moved(seed, **kind)
    found, expected = measure(scope), oracle.drift(dense(scope))
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(float(value), rel=1e-9), name
    parts = [(s.current.A.detach(), s.current.B.detach(), s.current.scale, s.core.k) for s in scope.sites]
    assert found.rho_floor == pytest.approx(oracle.floor(parts, expected["d_eff"]), rel=1e-9)
    assert found.d_block == found.d_eff


@pytest.mark.parametrize("step", [1e-3, 1e-5, 1e-7])
def test_small_changes_are_read_to_many_digits(step):
    scope = moved(step=step)
    for name, value in oracle.drift(dense(scope)).items():
        assert getattr(measure(scope), name) == pytest.approx(float(value), rel=1e-8 / step * 1e-3 + 1e-9), name


def test_layers_add_up_in_squares():
    drift = measure(moved())
    assert sum(each.d_eff**2 for each in drift.layers.values()) == pytest.approx(drift.d_eff**2, rel=1e-12)
    assert drift.d_eff**2 == pytest.approx(drift.d_old**2 + drift.d_new**2, rel=1e-6)  # cores stored in float32


def test_ratios_are_undefined_where_nothing_moved():
    drift = measure(scope_of())
    assert (drift.d_eff, drift.d_old) == (0.0, 0.0)
    assert (drift.rho, drift.rho_floor, drift.chance) == (None, None, None)
    assert drift.exact


def test_an_unaligned_change_reads_the_chance_level():
    scope = moved(sizes=((400, 300),), k=20, r=8, fresh=True, step=1.0)
    drift = measure(scope)
    assert drift.chance == pytest.approx((20 / 400) ** 0.5, rel=1e-9)
    assert drift.rho == pytest.approx(drift.chance, rel=0.25)


def test_rescaled_factors_read_alike():
    scope = moved(dtype=torch.float64)
    scaled = Scope(
        tuple(
            Site(s.layer, Factors(s.current.A.detach() / 3, s.current.B.detach() * 3, 4.0), s.anchor, core=s.core)
            for s in scope.sites
        )
    )
    assert measure(scaled).rho == pytest.approx(measure(scope).rho, rel=1e-9)


def test_other_cores_can_be_measured_on():
    scope = moved(dtype=torch.float64)
    others = {s.layer: Subspace(torch.linalg.qr(torch.randn(s.core.d, 2, dtype=torch.float64)).Q) for s in scope.sites}
    expected = oracle.drift([(dW, others[s.layer].basis) for (dW, _), s in zip(dense(scope), scope.sites, strict=True)])
    assert measure(scope, others).rho == pytest.approx(float(expected["rho"]), rel=1e-9)


def test_measuring_writes_nothing():
    scope = moved()
    before = [p.detach().clone() for p in parameters(scope)]
    measure(scope)
    assert all(torch.equal(x, y) for x, y in zip(before, parameters(scope), strict=True))
    assert all(p.grad is None for p in parameters(scope))


def test_a_site_without_any_core_is_named():
    site = scope_of().sites[0]
    with pytest.raises(ValueError, match="no core to measure on at layer0"):
        measure(Scope((Site(site.layer, site.current, site.anchor),)))


def test_rho_on_other_cores_is_that_of_the_whole_measurement():
    scope = moved()
    others = {s.layer: Subspace.joining([s.core, Subspace(torch.linalg.qr(torch.randn(s.core.d, 3)).Q)]) for s in scope.sites}
    assert rho_on(scope, others) == measure(scope, others).rho
    still = scope_of()
    assert rho_on(still, {s.layer: s.core for s in still.sites}) is None


def test_drift_of_held_out_rows_agrees_with_dense_float64():
    scope = moved()
    rows = {s.layer: torch.randn(11, s.core.d) for s in scope.sites}
    sums = {"total": 0.0, "on_core": 0.0, "off_core": 0.0}
    size = 0.0
    for (dW, V), site in zip(dense(scope), scope.sites, strict=True):
        x, P = rows[site.layer].double(), oracle.projector(V)
        size += float((x**2).sum())
        for name, part in (("total", x), ("on_core", x @ V.double() @ V.double().T), ("off_core", x @ P)):
            sums[name] += float(((dW @ part.T) ** 2).sum())
    expected = {name: (value / size) ** 0.5 for name, value in sums.items()}
    assert held_out_drift(scope, rows) == pytest.approx(expected, rel=1e-6)
    assert held_out_drift(scope, {layer: torch.zeros_like(x) for layer, x in rows.items()}) is None


def test_a_protected_run_counts_as_exact_and_an_unprotected_one_does_not():
    from anchorlora import Freeze, ProjectDisplacement

    for constraints, exact in (([Freeze("B"), ProjectDisplacement("A")], True), ([Freeze("B")], False)):
        scope = scope_of()
        optimizer = optimizer_for(scope, "adamw")
        with protect(optimizer, scope, constraints):
            train(scope, optimizer, 50)
        assert measure(scope).exact is exact
