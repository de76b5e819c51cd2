"""Penalties against the dense oracle: value and gradient, once per step, before gradients are projected."""

import pytest
import torch

import oracle
from anchorlora import EffectiveResponse, ProjectGradient, RoutingOverlap, protect
from toys import on_core, optimizer_for, parameters, scope_of, train


def gradients_added(scope, constraint):
    """What one step's penalty adds to zero gradients, and its reading."""
    optimizer = torch.optim.SGD(parameters(scope), lr=0.0)
    for p in parameters(scope):
        p.grad = torch.zeros_like(p)
    with protect(optimizer, scope, [constraint]) as held:
        optimizer.step()
    return [(site.factor("A").grad.clone(), site.factor("B").grad.clone()) for site in scope.sites], held[0].readings()


def test_overlap_agrees_with_the_written_double_sum():
    scope = scope_of(history=True, dtype=torch.float64)
    found, readings = gradients_added(scope, RoutingOverlap(0.5))
    total = sum(oracle.overlap(site.frozen.A, site.factor("A")) for site in scope.sites)
    expected = torch.autograd.grad(0.5 * total, [site.factor("A") for site in scope.sites])
    assert readings == {"overlap": pytest.approx(float(total.detach()), rel=1e-12)}
    for (on_a, on_b), want in zip(found, expected, strict=True):
        assert torch.allclose(on_a, want, rtol=1e-12)
        assert not on_b.any()


@pytest.mark.parametrize("fresh", [True, False])
def test_effective_response_agrees_with_the_dense_mean_square(fresh):
    scope = scope_of(fresh=fresh, wide=12, dtype=torch.float64)
    with torch.no_grad():
        for site in scope.sites:
            site.factor("A").add_(0.1 * torch.randn_like(site.factor("A")))
            site.factor("B").add_(0.1 * torch.randn_like(site.factor("B")))
    found, readings = gradients_added(scope, EffectiveResponse(3.0))
    parts = [(s.factor("A"), s.factor("B"), s.anchor.A, s.anchor.B, 4.0, s.wide.basis.double()) for s in scope.sites]
    value = oracle.response(parts)
    expected = torch.autograd.grad(3.0 * value, parameters(scope))
    assert readings == {"effective": pytest.approx(float(value.detach()), rel=1e-10)}
    for mine, want in zip([g for pair in found for g in pair], expected, strict=True):
        assert torch.allclose(mine, want, rtol=1e-9, atol=1e-14)


def test_effective_response_is_silent_at_the_start_of_a_fresh_block():
    scope = scope_of(fresh=True, wide=12)
    found, readings = gradients_added(scope, EffectiveResponse(1.0))
    assert readings["effective"] == 0.0
    assert not any(g.any() for pair in found for g in pair)


def test_a_penalty_is_added_once_per_step_however_many_micro_batches_there_were():
    scope = scope_of(history=True)
    added, _ = gradients_added(scope, RoutingOverlap(0.5))
    optimizer = torch.optim.SGD(parameters(scope), lr=0.0)
    with protect(optimizer, scope, [RoutingOverlap(0.5)]):
        for _ in range(8):  # backward passes of one accumulated step, here without a loss of their own
            for p in parameters(scope):
                p.grad = torch.zeros_like(p)
        optimizer.step()
    for site, (on_a, _) in zip(scope.sites, added, strict=True):
        assert torch.equal(site.factor("A").grad, on_a)


@pytest.mark.parametrize("order", [0, 1])
def test_penalty_gradients_are_projected_too_whatever_the_order_of_the_list(order):
    scope = scope_of(history=True, dtype=torch.float64)
    optimizer = torch.optim.SGD(parameters(scope), lr=0.0)
    for p in parameters(scope):
        p.grad = torch.zeros_like(p)
    constraints = [RoutingOverlap(0.5), ProjectGradient("A")][:: 1 if order == 0 else -1]
    with protect(optimizer, scope, constraints):
        optimizer.step()
    for site in scope.sites:
        gradient = site.factor("A").grad
        assert float(gradient.norm()) > 1
        assert on_core(site, gradient) < 1e-13 * float(gradient.norm())


def test_the_overlap_shrinks_when_it_is_trained_against():
    scope = scope_of(history=True, fresh=True)
    before = sum(float(oracle.overlap(s.frozen.A, s.factor("A").detach())) for s in scope.sites)
    optimizer = optimizer_for(scope, "adamw")
    with protect(optimizer, scope, [RoutingOverlap(5.0)]) as held:
        train(scope, optimizer, 50)
    assert held[0].readings()["overlap"] < before / 3


def test_overlap_without_earlier_blocks_is_refused():
    scope = scope_of()
    with (
        pytest.raises(ValueError, match="needs the frozen rows of earlier blocks"),
        protect(optimizer_for(scope, "sgd"), scope, [RoutingOverlap(0.5)]),
    ):
        pass


def test_effective_response_without_a_wide_basis_is_refused():
    scope = scope_of()
    with (
        pytest.raises(ValueError, match="needs a wide basis at layer0"),
        protect(optimizer_for(scope, "sgd"), scope, [EffectiveResponse(1.0)]),
    ):
        pass


def test_descriptions_are_values():
    assert RoutingOverlap(0.5) == RoutingOverlap(0.5)
    assert hash(ProjectGradient("A")) == hash(ProjectGradient("A"))
    assert RoutingOverlap(0.5) != RoutingOverlap(1.0)
