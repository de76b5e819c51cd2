"""The laws of constraints, over every stock optimizer; and their premises, asserted as failures."""

from dataclasses import dataclass

import pytest
import torch

from anchorlora import Freeze, Held, ProjectDisplacement, ProjectGradient, ProjectStep, Retract, protect
from anchorlora.constraints.base import ProtectsPast
from toys import (
    OPTIMIZERS,
    SCALE_ALL_COORDINATES_ALIKE,
    anchored,
    displacement,
    norm,
    on_core,
    optimizer_for,
    parameters,
    scope_of,
    train,
)

EPS = torch.finfo(torch.float32).eps
STEPS = 100
BENT = sorted(set(OPTIMIZERS) - SCALE_ALL_COORDINATES_ALIKE)


def assert_stays_off_core(site, rows, bound, sentence):
    found = on_core(site, rows)
    assert found <= bound, f"{site.layer}: |rows V| = {found:.1e}, allowed {bound:.1e}: {sentence}"


@dataclass(frozen=True)
class Seen(ProtectsPast):
    """Constrains nothing, and keeps each factor A as the optimizer made it."""

    seen: list

    def hold(self, scope):
        return _Seen(scope, self.seen)


class _Seen(Held):
    def __init__(self, scope, seen):
        self.scope, self.seen = scope, seen

    def moved(self):
        self.seen += [site.factor("A").detach().clone() for site in self.scope.sites]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_displacement_projection_keeps_the_move_off_the_core(name):
    scope = scope_of()
    optimizer = optimizer_for(scope, name)
    with protect(optimizer, scope, [ProjectGradient("A"), ProjectDisplacement("A")]):
        train(scope, optimizer, STEPS)
    for site in scope.sites:
        moved = float(displacement(site).norm())
        assert moved > 1e3 * EPS * norm(site.factor("A")), f"{name} moved nothing"
        assert_stays_off_core(site, displacement(site), 2 * EPS * norm(site.factor("A")), "the displacement left the complement")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_retracted_block_has_no_response_on_the_core_for_any_b(name):
    scope = scope_of(fresh=True)
    optimizer = optimizer_for(scope, name)
    with protect(optimizer, scope, [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]):
        train(scope, optimizer, STEPS)
    for site in scope.sites:
        A, B = site.factor("A").detach().double(), site.factor("B").detach().double()
        assert float(B.norm()) > 1e-3, f"{name} did not train B"
        assert_stays_off_core(site, A, 2 * EPS * float(A.norm()), "the state left the complement")
        other = torch.randn_like(B)  # any B at all
        assert_stays_off_core(site, other @ A, 2 * EPS * float(A.norm() * other.norm()), "the response is not zero")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_frozen_factor_stays_bitwise_equal_despite_decay_and_a_stale_gradient(name):
    scope = scope_of()
    optimizer = optimizer_for(scope, name)
    train(scope, optimizer, 3)  # the optimizer has moments for B now
    scope = anchored(scope)
    for parameter in parameters(scope):
        parameter.grad = torch.ones_like(parameter)
    kept = [site.factor("B").detach().clone() for site in scope.sites]
    with protect(optimizer, scope, [Freeze("B")]):
        train(scope, optimizer, 60)
    assert all(torch.equal(site.factor("B"), before) for site, before in zip(scope.sites, kept, strict=True))
    assert all(site.factor("B").requires_grad for site in scope.sites), "protect gives B back when the block ends"


@pytest.mark.parametrize("name", BENT)
def test_gradient_projection_alone_leaks_where_coordinates_are_scaled_apart(name):
    """The premise of projecting the move.  If this fails, an optimizer has become kinder than we think."""
    scope = scope_of()
    optimizer = optimizer_for(scope, name)
    with protect(optimizer, scope, [ProjectGradient("A")]):
        train(scope, optimizer, STEPS)
    site = scope.sites[0]
    share = on_core(site, displacement(site)) / float(displacement(site).norm())
    assert share > 1e-3, f"{name}: only {share:.1e} of the displacement is on the core"


@pytest.mark.parametrize("name", sorted(SCALE_ALL_COORDINATES_ALIKE))
def test_gradient_projection_is_enough_where_all_coordinates_are_scaled_alike(name):
    scope = scope_of(dtype=torch.float64)
    optimizer = optimizer_for(scope, name)
    with protect(optimizer, scope, [ProjectGradient("A")]):
        train(scope, optimizer, STEPS)
    for site in scope.sites:
        assert norm(displacement(site)) > 1e-3
        assert on_core(site, displacement(site)) <= 1e-12 * norm(site.factor("A"))


def test_displacement_projection_changes_nothing_under_plain_sgd_with_projected_gradients():
    ends = []
    for constraints in ([ProjectGradient("A")], [ProjectGradient("A"), ProjectDisplacement("A")]):
        scope = scope_of(dtype=torch.float64)
        optimizer = optimizer_for(scope, "sgd")
        with protect(optimizer, scope, constraints):
            train(scope, optimizer, 30)
        ends.append([site.factor("A").detach().clone() for site in scope.sites])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other, atol=1e-12 * norm(one))


def test_a_projected_move_is_computed_in_float64_and_rounded_once():
    scope = scope_of()
    optimizer, seen = optimizer_for(scope, "adamw"), []
    with protect(optimizer, scope, [ProjectDisplacement("A"), Seen(seen)]):
        train(scope, optimizer, 5)
    for raw, site in zip(seen[-len(scope.sites) :], scope.sites, strict=True):
        V, start = site.core.basis.double(), site.start("A").double()
        move = raw.double() - start
        assert torch.equal(site.factor("A").detach(), (start + (move - move @ V @ V.T)).float())


def test_the_step_form_and_the_anchored_form_take_the_same_path_in_float64():
    ends = []
    for form in (ProjectDisplacement, ProjectStep):
        scope = scope_of(dtype=torch.float64)
        optimizer = optimizer_for(scope, "adamw-decay")
        with protect(optimizer, scope, [ProjectGradient("A"), form("A")]):
            train(scope, optimizer, STEPS)
        ends.append(torch.cat([displacement(site).flatten() for site in scope.sites]))
    assert norm(ends[0] - ends[1]) < 1e-9 * norm(ends[0])  # training amplifies roundings of 1e-16 a little


def test_roundings_gather_in_the_step_form_and_not_in_the_anchored_form():
    left = {}
    for form in (ProjectDisplacement, ProjectStep):
        scope = scope_of(sizes=((256, 32),), r=8, k=20)
        optimizer = torch.optim.AdamW(parameters(scope), lr=1e-3)
        with protect(optimizer, scope, [form("A")]):
            train(scope, optimizer, 600)
        left[form] = on_core(scope.sites[0], displacement(scope.sites[0]))
    bound = EPS * norm(scope.sites[0].factor("A"))
    assert left[ProjectDisplacement] <= bound
    assert left[ProjectStep] > 3 * left[ProjectDisplacement]


def test_the_paper_counterexample_of_a_diagonal_preconditioner():
    """v = (1, 1)/sqrt 2, g = (1, -1): g v = 0, but g diag(1, 2) v = -1/sqrt 2 (appendix A.3)."""
    v, g = torch.tensor([1.0, 1.0]) / 2**0.5, torch.tensor([1.0, -1.0])
    assert float(g @ v) == 0
    assert float(g * torch.tensor([1.0, 2.0]) @ v) == pytest.approx(-1 / 2**0.5)
