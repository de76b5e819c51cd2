"""The laws of constraints, over every stock optimizer; and their premises, asserted as failures."""

from dataclasses import dataclass

import pytest
import torch

from anchorlora import Freeze, ProjectDisplacement, ProjectGradient, ProjectStep, Retract, protect
from anchorlora.constraints import ActiveConstraint
from anchorlora.constraints.base import ProtectsPast
from toys import (
    OPTIMIZERS,
    SCALE_ALL_COORDINATES_ALIKE,
    anchor_of,
    anchored,
    displacement,
    norm,
    on_core,
    optimizer_for,
    parameters,
    train,
)

EPS = torch.finfo(torch.float32).eps
STEPS = 100
BENT = sorted(set(OPTIMIZERS) - SCALE_ALL_COORDINATES_ALIKE)


def assert_stays_off_core(layer, rows, bound, sentence):
    found = on_core(layer, rows)
    assert found <= bound, f"{layer.name}: |rows V| = {found:.1e}, allowed {bound:.1e}: {sentence}"


@dataclass(frozen=True)
class Seen(ProtectsPast):
    """Constrains nothing, and keeps each factor A as the optimizer made it."""

    seen: list

    def begin_task(self, anchor):
        return _Seen(anchor, self.seen)


class _Seen(ActiveConstraint):
    def __init__(self, anchor, seen):
        self.anchor, self.seen = anchor, seen

    def after_raw_update(self):
        self.seen += [layer.factor("A").detach().clone() for layer in self.anchor.layers]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_displacement_projection_keeps_the_move_off_the_core(name):
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [ProjectGradient("A"), ProjectDisplacement("A")]):
        train(anchor, optimizer, STEPS)
    for layer in anchor.layers:
        moved = float(displacement(layer).norm())
        assert moved > 1e3 * EPS * norm(layer.factor("A")), f"{name} moved nothing"
        assert_stays_off_core(layer, displacement(layer), 2 * EPS * norm(layer.factor("A")), "the displacement left the complement")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_retracted_block_has_no_response_on_the_core_for_any_b(name):
    anchor = anchor_of(fresh=True)
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]):
        train(anchor, optimizer, STEPS)
    for layer in anchor.layers:
        A, B = layer.factor("A").detach().double(), layer.factor("B").detach().double()
        assert float(B.norm()) > 1e-3, f"{name} did not train B"
        assert_stays_off_core(layer, A, 2 * EPS * float(A.norm()), "the state left the complement")
        other = torch.randn_like(B)  # any B at all
        assert_stays_off_core(layer, other @ A, 2 * EPS * float(A.norm() * other.norm()), "the response is not zero")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_frozen_factor_stays_bitwise_equal_despite_decay_and_a_stale_gradient(name):
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, name)
    train(anchor, optimizer, 3)  # the optimizer has moments for B now
    anchor = anchored(anchor)
    for parameter in parameters(anchor):
        parameter.grad = torch.ones_like(parameter)
    kept = [layer.factor("B").detach().clone() for layer in anchor.layers]
    with protect(optimizer, anchor, [Freeze("B")]):
        train(anchor, optimizer, 60)
    assert all(torch.equal(layer.factor("B"), before) for layer, before in zip(anchor.layers, kept, strict=True))
    assert all(layer.factor("B").requires_grad for layer in anchor.layers), "protect gives B back when the block ends"


class WithoutRate(torch.optim.Optimizer):
    """An optimizer of somebody's own, whose groups hold nothing but parameters."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data -= 1e-2 * parameter.grad.sign()


def test_an_optimizer_without_a_learning_rate_is_protected_too():
    anchor = anchor_of()
    optimizer = WithoutRate(parameters(anchor), {})
    with protect(optimizer, anchor, [Freeze("B"), ProjectDisplacement("A")]):
        train(anchor, optimizer, STEPS)
    for layer in anchor.layers:
        assert_stays_off_core(layer, displacement(layer), 2 * EPS * norm(layer.factor("A")), "the displacement left the complement")


@pytest.mark.parametrize("name", BENT)
def test_gradient_projection_alone_leaks_where_coordinates_are_scaled_apart(name):
    """The premise of projecting the move.  If this fails, an optimizer has become kinder than we think."""
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [ProjectGradient("A")]):
        train(anchor, optimizer, STEPS)
    layer = anchor.layers[0]
    share = on_core(layer, displacement(layer)) / float(displacement(layer).norm())
    assert share > 1e-3, f"{name}: only {share:.1e} of the displacement is on the core"


@pytest.mark.parametrize("name", sorted(SCALE_ALL_COORDINATES_ALIKE))
def test_gradient_projection_is_enough_where_all_coordinates_are_scaled_alike(name):
    anchor = anchor_of(dtype=torch.float64)
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [ProjectGradient("A")]):
        train(anchor, optimizer, STEPS)
    for layer in anchor.layers:
        assert norm(displacement(layer)) > 1e-3
        assert on_core(layer, displacement(layer)) <= 1e-12 * norm(layer.factor("A"))


def test_displacement_projection_changes_nothing_under_plain_sgd_with_projected_gradients():
    ends = []
    for constraints in ([ProjectGradient("A")], [ProjectGradient("A"), ProjectDisplacement("A")]):
        anchor = anchor_of(dtype=torch.float64)
        optimizer = optimizer_for(anchor, "sgd")
        with protect(optimizer, anchor, constraints):
            train(anchor, optimizer, 30)
        ends.append([layer.factor("A").detach().clone() for layer in anchor.layers])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other, atol=1e-12 * norm(one))


def test_a_projected_move_is_computed_in_float64_and_rounded_once():
    anchor = anchor_of()
    optimizer, seen = optimizer_for(anchor, "adamw"), []
    with protect(optimizer, anchor, [ProjectDisplacement("A"), Seen(seen)]):
        train(anchor, optimizer, 5)
    for raw, layer in zip(seen[-len(anchor.layers) :], anchor.layers, strict=True):
        V, start = layer.core.basis.double(), layer.start_factor("A").double()
        move = raw.double() - start
        assert torch.equal(layer.factor("A").detach(), (start + (move - move @ V @ V.T)).float())


def test_the_step_form_and_the_anchored_form_take_the_same_path_in_float64():
    ends = []
    for form in (ProjectDisplacement, ProjectStep):
        anchor = anchor_of(dtype=torch.float64)
        optimizer = optimizer_for(anchor, "adamw-decay")
        with protect(optimizer, anchor, [ProjectGradient("A"), form("A")]):
            train(anchor, optimizer, STEPS)
        ends.append(torch.cat([displacement(layer).flatten() for layer in anchor.layers]))
    assert norm(ends[0] - ends[1]) < 1e-9 * norm(ends[0])  # training amplifies roundings of 1e-16 a little


SCHEDULE_FREE = ["AdamWScheduleFree", "AdamWScheduleFreeReference", "SGDScheduleFreeReference"]


@pytest.mark.parametrize("name", SCHEDULE_FREE)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_schedule_free_optimizer_serves_is_off_the_core(name, fresh):
    make = getattr(pytest.importorskip("schedulefree", reason="schedulefree is not installed"), name)
    anchor = anchor_of(fresh=fresh)
    optimizer = make(parameters(anchor), lr=1e-2)
    optimizer.train()
    with protect(optimizer, anchor, [Retract("A") if fresh else Freeze("B"), ProjectDisplacement("A")]):
        train(anchor, optimizer, 40)
    for switch in (optimizer.eval, optimizer.train):  # after the block, as whoever saves the adapter calls them
        switch()
        for layer in anchor.layers:
            A = layer.factor("A")
            assert_stays_off_core(layer, displacement(layer), 4 * EPS * norm(A), f"what {name} keeps left the complement")


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_a_factor_that_a_schedule_free_optimizer_has_trained_before_is_frozen_in_what_it_serves(name):
    """It went on to serve B as an average of the task before."""
    make = getattr(pytest.importorskip("schedulefree", reason="schedulefree is not installed"), name)
    anchor = anchor_of()
    optimizer = make(parameters(anchor), lr=1e-2)
    optimizer.train()
    train(anchor, optimizer, 10)
    anchor = anchored(anchor)
    with protect(optimizer, anchor, [Freeze("B"), ProjectDisplacement("A")]):
        train(anchor, optimizer, 10)
    for switch in (optimizer.eval, optimizer.train):
        switch()
        for layer in anchor.layers:
            assert torch.equal(layer.factor("B"), layer.start_factor("B"))
            assert_stays_off_core(layer, displacement(layer), 4 * EPS * norm(layer.factor("A")), "what is kept left the complement")


def test_roundings_gather_in_the_step_form_and_not_in_the_anchored_form():
    left = {}
    for form in (ProjectDisplacement, ProjectStep):
        anchor = anchor_of(sizes=((256, 32),), r=8, k=20)
        optimizer = torch.optim.AdamW(parameters(anchor), lr=1e-3)
        with protect(optimizer, anchor, [form("A")]):
            train(anchor, optimizer, 600)
        left[form] = on_core(anchor.layers[0], displacement(anchor.layers[0]))
    bound = EPS * norm(anchor.layers[0].factor("A"))
    assert left[ProjectDisplacement] <= bound
    assert left[ProjectStep] > 3 * left[ProjectDisplacement]


def test_the_paper_counterexample_of_a_diagonal_preconditioner():
    """v = (1, 1)/sqrt 2, g = (1, -1): g v = 0, but g diag(1, 2) v = -1/sqrt 2 (appendix A.3)."""
    v, g = torch.tensor([1.0, 1.0]) / 2**0.5, torch.tensor([1.0, -1.0])
    assert float(g @ v) == 0
    assert float(g * torch.tensor([1.0, 2.0]) @ v) == pytest.approx(-1 / 2**0.5)
