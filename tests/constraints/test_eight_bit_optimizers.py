"""The laws of constraints under bitsandbytes' optimizers, whose moments are stored in 8 bits."""

import pytest
import torch

from anchorlora import Freeze, ProjectDisplacement, ProjectGradient, Retract, measure, protect
from toys import displacement, norm, on_core, parameters, scope_of, train

optim = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").optim
EPS = torch.finfo(torch.float32).eps
NAMES = ["AdamW8bit", "Adam8bit", "Lion8bit"]


def optimizer_for(scope, name):
    settings = {"Lion8bit": {"lr": 1e-3}}.get(name, {"lr": 1e-2})
    return getattr(optim, name)(parameters(scope), weight_decay=0.1, min_8bit_size=16, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_displacement_projection_keeps_the_move_off_the_core(name):
    scope = scope_of()
    optimizer = optimizer_for(scope, name)
    with protect(optimizer, scope, [ProjectGradient("A"), ProjectDisplacement("A")]):
        train(scope, optimizer, 50)
    assert optimizer.state[scope.sites[0].factor("A")]["state1"].dtype == torch.uint8, "moments are in 8 bits"
    for site in scope.sites:
        assert norm(displacement(site)) > 1e3 * EPS * norm(site.factor("A")), f"{name} moved nothing"
        assert on_core(site, displacement(site)) <= 2 * EPS * norm(site.factor("A"))


@pytest.mark.parametrize("name", NAMES)
def test_a_retracted_block_and_a_frozen_companion_count_as_exact(name):
    fresh, shared = scope_of(fresh=True), scope_of()
    kept = [site.factor("B").detach().clone() for site in shared.sites]
    for scope, constraints in (
        (fresh, [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]),
        (shared, [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]),
    ):
        optimizer = optimizer_for(scope, name)
        with protect(optimizer, scope, constraints):
            train(scope, optimizer, 50)
        assert measure(scope).d_eff > 1e-3
        assert measure(scope).exact, f"rho {measure(scope).rho:.1e}"
    assert all(torch.equal(site.factor("B"), before) for site, before in zip(shared.sites, kept, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_gradient_projection_alone_leaks(name):
    """The premise of projecting the move."""
    scope = scope_of()
    optimizer = optimizer_for(scope, name)
    with protect(optimizer, scope, [ProjectGradient("A")]):
        train(scope, optimizer, 50)
    site = scope.sites[0]
    assert on_core(site, displacement(site)) > 1e-3 * norm(displacement(site))
