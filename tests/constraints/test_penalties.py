"""Penalties against the dense oracle: value and gradient, once per step, before gradients are projected."""

import pytest
import torch

import oracle
from anchorlora import EffectiveResponse, ProjectDisplacement, ProjectGradient, RoutingOverlap, protect
from anchorlora.errors import InvalidType
from toys import anchor_of, on_core, optimizer_for, parameters, train


def gradients_added(anchor, constraint):
    """What one step's penalty adds to zero gradients, and its reading."""
    optimizer = torch.optim.SGD(parameters(anchor), lr=0.0)
    for p in parameters(anchor):
        p.grad = torch.zeros_like(p)
    with protect(optimizer, anchor, [constraint]) as held:
        optimizer.step()
    return [(layer.factor("A").grad.clone(), layer.factor("B").grad.clone()) for layer in anchor.layers], held[0].readings()


def test_overlap_agrees_with_the_written_double_sum():
    anchor = anchor_of(history=True, dtype=torch.float64)
    found, readings = gradients_added(anchor, RoutingOverlap(0.5))
    total = sum(oracle.overlap(layer.history.A, layer.factor("A")) for layer in anchor.layers)
    expected = torch.autograd.grad(0.5 * total, [layer.factor("A") for layer in anchor.layers])
    assert readings == {"overlap": pytest.approx(float(total.detach()), rel=1e-12)}
    for (on_a, on_b), want in zip(found, expected, strict=True):
        assert torch.allclose(on_a, want, rtol=1e-12)
        assert not on_b.any()


@pytest.mark.parametrize("fresh", [True, False])
def test_effective_response_agrees_with_the_dense_mean_square(fresh):
    anchor = anchor_of(fresh=fresh, wide=12, dtype=torch.float64)
    with torch.no_grad():
        for layer in anchor.layers:
            layer.factor("A").add_(0.1 * torch.randn_like(layer.factor("A")))
            layer.factor("B").add_(0.1 * torch.randn_like(layer.factor("B")))
    found, readings = gradients_added(anchor, EffectiveResponse(3.0))
    parts = [(s.factor("A"), s.factor("B"), s.start.A, s.start.B, 4.0, s.wide.basis.double()) for s in anchor.layers]
    value = oracle.response(parts)
    expected = torch.autograd.grad(3.0 * value, parameters(anchor))
    assert readings == {"effective": pytest.approx(float(value.detach()), rel=1e-10)}
    for mine, want in zip([g for pair in found for g in pair], expected, strict=True):
        assert torch.allclose(mine, want, rtol=1e-9, atol=1e-14)


def test_effective_response_is_silent_at_the_start_of_a_fresh_block():
    anchor = anchor_of(fresh=True, wide=12)
    found, readings = gradients_added(anchor, EffectiveResponse(1.0))
    assert readings["effective"] == 0.0
    assert not any(g.any() for pair in found for g in pair)


def test_a_penalty_is_added_once_per_step_however_many_micro_batches_there_were():
    anchor = anchor_of(history=True)
    added, _ = gradients_added(anchor, RoutingOverlap(0.5))
    optimizer = torch.optim.SGD(parameters(anchor), lr=0.0)
    with protect(optimizer, anchor, [RoutingOverlap(0.5)]):
        for _ in range(8):  # backward passes of one accumulated step, here without a loss of their own
            for p in parameters(anchor):
                p.grad = torch.zeros_like(p)
        optimizer.step()
    for layer, (on_a, _) in zip(anchor.layers, added, strict=True):
        assert torch.equal(layer.factor("A").grad, on_a)


@pytest.mark.parametrize("frozen", ["A", "B"])
def test_a_frozen_factor_gets_no_gradient_and_the_other_gets_its_own(frozen):
    anchor = anchor_of(wide=12)
    with torch.no_grad():
        for p in parameters(anchor):
            p.add_(0.1)
    expected, _ = gradients_added(anchor, EffectiveResponse(1.0))
    for p in parameters(anchor):
        p.grad = None
    for layer in anchor.layers:
        layer.factor(frozen).requires_grad_(False)
    EffectiveResponse(1.0).begin_task(anchor).add_penalty_grads()
    for layer, (on_a, on_b) in zip(anchor.layers, expected, strict=True):
        trained, gradient = ("A", on_a) if frozen == "B" else ("B", on_b)
        assert layer.factor(frozen).grad is None
        assert torch.equal(layer.factor(trained).grad, gradient)
        assert gradient.any()


@pytest.mark.parametrize("order", [0, 1])
def test_penalty_gradients_are_projected_too_whatever_the_order_of_the_list(order):
    anchor = anchor_of(history=True, dtype=torch.float64)
    optimizer = torch.optim.SGD(parameters(anchor), lr=0.0)
    for p in parameters(anchor):
        p.grad = torch.zeros_like(p)
    constraints = [RoutingOverlap(0.5), ProjectGradient("A")][:: 1 if order == 0 else -1]
    with protect(optimizer, anchor, constraints):
        optimizer.step()
    for layer in anchor.layers:
        gradient = layer.factor("A").grad
        assert float(gradient.norm()) > 1
        assert on_core(layer, gradient) < 1e-13 * float(gradient.norm())


def test_the_overlap_shrinks_when_it_is_trained_against():
    anchor = anchor_of(history=True, fresh=True)
    before = sum(float(oracle.overlap(s.history.A, s.factor("A").detach())) for s in anchor.layers)
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [RoutingOverlap(5.0)]) as held:
        train(anchor, optimizer, 50)
    assert held[0].readings()["overlap"] < before / 3


def test_overlap_without_earlier_blocks_is_refused():
    anchor = anchor_of()
    with (
        pytest.raises(ValueError, match="needs the frozen rows of earlier blocks"),
        protect(optimizer_for(anchor, "sgd"), anchor, [RoutingOverlap(0.5)]),
    ):
        pass


def test_effective_response_without_a_wide_basis_is_refused():
    anchor = anchor_of()
    with (
        pytest.raises(ValueError, match="needs a wide basis at layer0"),
        protect(optimizer_for(anchor, "sgd"), anchor, [EffectiveResponse(1.0)]),
    ):
        pass


def test_a_penalty_is_refused_where_the_optimizer_would_maximize_it():
    anchor = anchor_of(history=True)
    optimizer = torch.optim.SGD(parameters(anchor), lr=1e-2, maximize=True)
    refused = pytest.raises(InvalidType, match="but the optimizer maximizes; negate the loss")
    with refused, protect(optimizer, anchor, [RoutingOverlap()]):
        train(anchor, optimizer, 1)
    with protect(optimizer, anchor, [ProjectDisplacement("A")]):
        train(anchor, optimizer, 1)


def test_descriptions_are_values():
    assert RoutingOverlap(0.5) == RoutingOverlap(0.5)
    assert hash(ProjectGradient("A")) == hash(ProjectGradient("A"))
    assert RoutingOverlap(0.5) != RoutingOverlap(1.0)
