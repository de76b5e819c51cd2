import pytest
import torch

import oracle
from anchorlora import AdaptedLayer, Anchor, Subspace, measure, protect
from anchorlora.errors import NotFinite
from anchorlora.geometry import Factors
from anchorlora.measurement import held_out_drift, rho_on
from toys import anchor_of, optimizer_for, parameters, train


def moved(seed=0, step=0.2, **kind):
    anchor = anchor_of(seed=seed, **kind)
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in parameters(anchor):
            p.add_(step * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype))
    return anchor


def dense(anchor):
    layers = []
    for s in anchor.layers:
        layers.append((oracle.change(s.current.A, s.current.B, s.start.A, s.start.B, s.current.scale), s.core.basis))
    return layers


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [{}, {"fresh": True}, {"dtype": torch.float64}])
def test_every_field_agrees_with_dense_float64(seed, kind):
    anchor = moved(seed, **kind)
    found, expected = measure(anchor), oracle.drift(dense(anchor))
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(float(value), rel=1e-9), name
    parts = [(s.current.A.detach(), s.current.B.detach(), s.current.scale, s.core.k) for s in anchor.layers]
    assert found.rho_floor == pytest.approx(oracle.floor(parts, expected["d_eff"]), rel=1e-9)
    assert found.d_block == found.d_eff


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_that_hold_no_numbers_are_not_called_unmoved(value):
    anchor = moved(0)
    with torch.no_grad():
        anchor.layers[1].factor("A")[0, 0] = value
    with pytest.raises(NotFinite, match=f"the factors of {anchor.layers[1].name} hold NaN or infinite values"):
        measure(anchor)


@pytest.mark.parametrize("step", [1e-3, 1e-5, 1e-7])
def test_small_changes_are_read_to_many_digits(step):
    anchor = moved(step=step)
    for name, value in oracle.drift(dense(anchor)).items():
        assert getattr(measure(anchor), name) == pytest.approx(float(value), rel=1e-8 / step * 1e-3 + 1e-9), name


def test_layers_add_up_in_squares():
    drift = measure(moved())
    assert sum(each.d_eff**2 for each in drift.layers.values()) == pytest.approx(drift.d_eff**2, rel=1e-12)
    assert drift.d_eff**2 == pytest.approx(drift.d_old**2 + drift.d_new**2, rel=1e-6)  # cores stored in float32


def test_ratios_are_undefined_where_nothing_moved():
    drift = measure(anchor_of())
    assert (drift.d_eff, drift.d_old) == (0.0, 0.0)
    assert (drift.rho, drift.rho_floor, drift.chance) == (None, None, None)
    assert drift.exact


def test_an_unaligned_change_reads_the_chance_level():
    anchor = moved(sizes=((400, 300),), k=20, r=8, fresh=True, step=1.0)
    drift = measure(anchor)
    assert drift.chance == pytest.approx((20 / 400) ** 0.5, rel=1e-9)
    assert drift.rho == pytest.approx(drift.chance, rel=0.25)


def test_rescaled_factors_read_alike():
    anchor = moved(dtype=torch.float64)
    scaled = Anchor(
        tuple(
            AdaptedLayer(s.name, Factors(s.current.A.detach() / 3, s.current.B.detach() * 3, 4.0), s.start, core=s.core)
            for s in anchor.layers
        )
    )
    assert measure(scaled).rho == pytest.approx(measure(anchor).rho, rel=1e-9)


def test_other_cores_can_be_measured_on():
    anchor = moved(dtype=torch.float64)
    others = {s.name: Subspace(torch.linalg.qr(torch.randn(s.core.d, 2, dtype=torch.float64)).Q) for s in anchor.layers}
    expected = oracle.drift([(dW, others[s.name].basis) for (dW, _), s in zip(dense(anchor), anchor.layers, strict=True)])
    assert measure(anchor, others).rho == pytest.approx(float(expected["rho"]), rel=1e-9)


def test_measuring_writes_nothing():
    anchor = moved()
    before = [p.detach().clone() for p in parameters(anchor)]
    measure(anchor)
    assert all(torch.equal(x, y) for x, y in zip(before, parameters(anchor), strict=True))
    assert all(p.grad is None for p in parameters(anchor))


def test_a_site_without_any_core_is_named():
    layer = anchor_of().layers[0]
    with pytest.raises(ValueError, match="no core to measure on at layer0"):
        measure(Anchor((AdaptedLayer(layer.name, layer.current, layer.start),)))


def test_rho_on_other_cores_is_that_of_the_whole_measurement():
    anchor = moved()
    others = {s.name: Subspace.joining([s.core, Subspace(torch.linalg.qr(torch.randn(s.core.d, 3)).Q)]) for s in anchor.layers}
    assert rho_on(anchor, others) == measure(anchor, others).rho
    little = moved(step=1e-6)
    assert rho_on(little, others) == measure(little, others).rho, "a move below 1 is a move"
    still = anchor_of()
    assert rho_on(still, {s.name: s.core for s in still.layers}) is None


@pytest.mark.parametrize(("n", "shared"), [(11, False), (300, False), (150, True)])
def test_drift_of_held_out_rows_agrees_with_dense_float64(n, shared):
    """Also for layers that read the same rows, as q_proj and v_proj do, and for more rows than are multiplied at once."""
    anchor = moved(sizes=((24, 16), (24, 28), (24, 9))) if shared else moved()
    rows = {s.name: torch.randn(n, s.core.d) for s in anchor.layers}
    rows |= dict.fromkeys(("layer1", "layer2"), rows["layer1"]) if shared else {}
    sums = {"total": 0.0, "on_core": 0.0, "off_core": 0.0}
    size = 0.0
    for (dW, V), layer in zip(dense(anchor), anchor.layers, strict=True):
        x, P = rows[layer.name].double(), oracle.projector(V)
        size += float((x**2).sum())
        for name, part in (("total", x), ("on_core", x @ V.double() @ V.double().T), ("off_core", x @ P)):
            sums[name] += float(((dW @ part.T) ** 2).sum())
    expected = {name: (value / size) ** 0.5 for name, value in sums.items()}
    assert held_out_drift(anchor, rows) == pytest.approx(expected, rel=1e-6)
    assert held_out_drift(anchor, {path: torch.zeros_like(x) for path, x in rows.items()}) is None


def test_a_protected_run_counts_as_exact_and_an_unprotected_one_does_not():
    from anchorlora import Freeze, ProjectDisplacement

    for constraints, exact in (([Freeze("B"), ProjectDisplacement("A")], True), ([Freeze("B")], False)):
        anchor = anchor_of()
        optimizer = optimizer_for(anchor, "adamw")
        with protect(optimizer, anchor, constraints):
            train(anchor, optimizer, 50)
        assert measure(anchor).exact is exact
