import copy
import re
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from accelerate import Accelerator

import models
from anchorlora import Factors, Freeze, Held, ProjectDisplacement, ProjectGradient, ProjectStep, Retract, Scope, Site, protect
from anchorlora.adapters import Blocks, lora_layers
from anchorlora.errors import ProtectionLost
from toys import displacement, on_core, optimizer_for, parameters, scope_of, task_loss, train


@dataclass(frozen=True)
class Recording:
    """Constrains nothing and writes down when it was called."""

    name: str
    log: list
    from_task = 2
    reads = ()

    def hold(self, scope):
        return _Writing(self)

    def remember(self, scope):
        return {}


class _Writing(Held):
    def __init__(self, owner):
        self.owner = owner

    def arrived(self):
        self.owner.log.append((self.owner.name, "arrived"))

    def add_gradients(self):
        self.owner.log.append((self.owner.name, "add_gradients"))

    def before_step(self):
        self.owner.log.append((self.owner.name, "before_step"))

    def moved(self):
        self.owner.log.append((self.owner.name, "moved"))

    def after_step(self):
        self.owner.log.append((self.owner.name, "after_step"))


def hooks_of(optimizer):
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_each_moment_runs_over_all_constraints_before_the_next_begins():
    scope, log = scope_of(), []
    optimizer = optimizer_for(scope, "adamw")
    with protect(optimizer, scope, [Recording("a", log), Recording("b", log)]):
        train(scope, optimizer, 1)
    moments = ["arrived", "add_gradients", "before_step", "moved", "after_step"]
    assert log == [(name, moment) for moment in moments for name in ("a", "b")]


def test_hooks_are_gone_after_the_block_and_after_an_exception_inside_it():
    scope = scope_of()
    optimizer = optimizer_for(scope, "adamw")
    with protect(optimizer, scope, [ProjectDisplacement("A")]):
        assert hooks_of(optimizer) == 2
    assert hooks_of(optimizer) == 0
    with pytest.raises(KeyError), protect(optimizer, scope, [Freeze("B")]):
        raise KeyError
    assert hooks_of(optimizer) == 0
    assert all(p.requires_grad for p in parameters(scope))


def test_a_constraint_that_refuses_leaves_no_hook_and_no_frozen_factor():
    scope = scope_of()  # a learned anchor: retracting it would change the function
    optimizer = optimizer_for(scope, "adamw")
    with (
        pytest.raises(ValueError, match="retracting A at layer0 would change the function"),
        protect(optimizer, scope, [Freeze("B"), Retract("A")]),
    ):
        pass
    assert hooks_of(optimizer) == 0
    assert all(p.requires_grad for p in parameters(scope))


def test_hooks_fire_once_per_real_step_under_accumulation():
    scope, log = scope_of(), []
    optimizer = optimizer_for(scope, "adamw")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    module = torch.nn.ParameterList(parameters(scope))
    module, wrapped = accelerator.prepare(module, optimizer)
    with protect(wrapped, scope, [Recording("a", log)]):
        for _ in range(16):
            with accelerator.accumulate(module):
                accelerator.backward(task_loss(scope))
                wrapped.step()
                wrapped.zero_grad()
    assert log.count(("a", "after_step")) == 4


def test_gradients_are_switched_off_inside_hooks():
    scope, seen = scope_of(), []

    class Looking(_Writing):
        def after_step(self):
            seen.append(torch.is_grad_enabled())

    class Look(Recording):
        def hold(self, scope):
            return Looking(self)

    optimizer = optimizer_for(scope, "adamw")
    with protect(optimizer, scope, [Look("x", [])]):
        train(scope, optimizer, 1)
    assert seen == [False]


def test_a_constraint_that_needs_the_loss_is_refused_where_nobody_asks_for_it():
    class Losing(Held):
        def loss(self, batch, outputs):
            return torch.zeros(())

    class Distil(Recording):
        def hold(self, scope):
            return Losing()

    scope = scope_of()
    optimizer = optimizer_for(scope, "sgd")
    with (
        protect(optimizer, scope, [Distil("d", [])]),
        pytest.raises(TypeError, match="Losing adds to the loss, but this loop never asks"),
    ):
        train(scope, optimizer, 1)
    with protect(optimizer, scope, [Distil("d", [])]) as held:
        held[0].loss(None, None)
        train(scope, optimizer, 1)


def test_an_optimizer_of_other_parameters_is_refused():
    scope, other = scope_of(), scope_of(seed=3)
    with (
        pytest.raises(ValueError, match="factor A at layer0 trains but is not in this optimizer"),
        protect(optimizer_for(other, "adamw"), scope, []),
    ):
        pass
    deep = copy.deepcopy(parameters(scope))
    with pytest.raises(ValueError, match="not in this optimizer"), protect(torch.optim.SGD(deep, lr=1.0), scope, []):
        pass


def test_optimizers_whose_steps_cannot_be_followed_are_refused():
    scope = scope_of()
    with (
        pytest.raises(TypeError, match="LBFGS moves the parameters several times"),
        protect(torch.optim.LBFGS(parameters(scope)), scope, []),
    ):
        pass
    with pytest.raises(TypeError, match="list is no torch optimizer"), protect([], scope, []):
        pass
    differentiable = torch.optim.SGD(parameters(scope), lr=1.0, differentiable=True)
    with pytest.raises(TypeError, match="differentiable"), protect(differentiable, scope, []):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_factors_are_refused_with_the_remedy(dtype):
    scope = scope_of(dtype=dtype, fresh=True)
    optimizer = torch.optim.SGD(parameters(scope), lr=1.0)
    for constraint in (ProjectDisplacement("A"), Retract("A")):
        with (
            pytest.raises(TypeError, match="needs float32 factors, but A at layer0 is .*autocast_adapter_dtype=True"),
            protect(optimizer, scope, [constraint]),
        ):
            pass


def test_a_site_without_a_core_or_with_one_of_another_width_is_refused():
    site = scope_of().sites[0]
    optimizer = torch.optim.SGD([site.factor("A"), site.factor("B")], lr=1.0)
    bare = Scope((Site(site.layer, site.current, site.anchor),))
    with (
        pytest.raises(ValueError, match="nothing is protected at layer0: it has no core"),
        protect(optimizer, bare, [ProjectGradient("A")]),
    ):
        pass
    odd = Scope((Site(site.layer, site.current, site.anchor, core=scope_of().sites[1].core),))
    with pytest.raises(ValueError, match="width 20, but its A reads 24"), protect(optimizer, odd, [ProjectDisplacement("A")]):
        pass


def test_displacement_projection_may_be_listed_before_retraction():
    scope = scope_of(fresh=True)
    optimizer = optimizer_for(scope, "adamw")
    with protect(optimizer, scope, [ProjectDisplacement("A"), Retract("A")]):
        train(scope, optimizer, 20)
    for site in scope.sites:
        A = site.factor("A").detach().double()
        assert float((A @ site.core.basis.double()).norm()) <= 2 * torch.finfo(torch.float32).eps * float(A.norm())


def test_an_unknown_factor_is_named():
    site = scope_of().sites[0]
    with pytest.raises(LookupError, match='factors "A" and "B", not \'C\''):
        site.factor("C")


def test_a_skipped_step_of_a_gradient_scaler_calls_no_hook():
    scope, log = scope_of(), []
    optimizer = optimizer_for(scope, "adamw")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with protect(optimizer, scope, [Recording("a", log), ProjectGradient("A"), ProjectDisplacement("A")]):
        for step in range(6):
            scaler.scale(task_loss(scope)).backward()
            if step in (1, 4):
                scope.sites[0].factor("A").grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert log.count(("a", "after_step")) == 4


def test_fresh_factors_are_copied_into_the_anchor_not_shared_with_it():
    current = Factors(torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.zeros(4, 2)), 1.0)
    anchor = current.copy()
    with torch.no_grad():
        current.A.add_(1)
    assert torch.equal(anchor.A, torch.ones(2, 3))


SFOR = [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]


def test_hooks_that_others_take_off_are_missed_at_the_end():
    scope = scope_of()
    optimizer = optimizer_for(scope, "adamw")
    with pytest.raises(ProtectionLost, match="step hooks were taken off"), protect(optimizer, scope, SFOR):
        optimizer._optimizer_step_post_hooks.clear()
        train(scope, optimizer, 1)


def test_a_replaced_optimizer_is_noticed_at_the_end_by_what_it_did():
    scope = scope_of()
    with (
        pytest.raises(ProtectionLost, match=r"\|dA V\| at layer0 is .*no step of the protected optimizer was seen"),
        protect(optimizer_for(scope, "adamw"), scope, SFOR),
    ):
        train(scope, optimizer_for(scope, "adamw"), 3)


def test_parameters_taken_out_of_the_optimizer_are_noticed():
    scope = scope_of()
    optimizer = optimizer_for(scope, "adamw")
    with pytest.raises(ProtectionLost, match="no longer holds the factors of layer0"), protect(optimizer, scope, SFOR):
        optimizer.param_groups[0]["params"] = parameters(scope)[2:]


def test_factors_that_are_replaced_in_the_model_are_noticed():
    blocks = Blocks(models.qwen3(), targets=("q_proj",), rank=2, alpha=4)
    optimizer = torch.optim.AdamW(blocks.trainable())
    lost = pytest.raises(ProtectionLost, match=r"the factors of model\S*q_proj in the model are other parameters now")
    with lost, protect(optimizer, blocks.scope(), []):
        routing = next(iter(lora_layers(blocks.model).values())).lora_A["current"]
        routing.weight = torch.nn.Parameter(routing.weight.detach().clone())


def test_what_another_program_writes_between_steps_is_noticed_after_the_second_step_and_then_now_and_then():
    for step, seen in ((1, "by step 2"), (4, "by step 5")):
        scope = scope_of()
        optimizer = optimizer_for(scope, "adamw")
        lost = pytest.raises(ProtectionLost, match=f"{seen}: the frozen factor B at layer1 has moved")
        with lost, protect(optimizer, scope, SFOR, check_every=5):
            train(scope, optimizer, step)
            with torch.no_grad():
                scope.sites[1].factor("B")[0, 0] += 1e-3
            train(scope, optimizer, 3)


def test_an_exception_in_the_loop_is_not_covered_by_a_look_at_the_promises():
    scope = scope_of()
    with pytest.raises(KeyError), protect(optimizer_for(scope, "adamw"), scope, SFOR):
        train(scope, optimizer_for(scope, "adamw"), 3)  # breaks the promise
        raise KeyError


def test_a_move_as_small_as_rounding_is_no_loss_of_protection():
    """A ratio alone would be of order one here."""
    scope = scope_of()
    optimizer = torch.optim.SGD(parameters(scope), lr=1e-9)
    with protect(optimizer, scope, SFOR):
        train(scope, optimizer, 20)


def test_a_block_that_is_feasible_already_is_left_as_it_is_by_retraction():
    scope = scope_of(fresh=True)
    optimizer = optimizer_for(scope, "adamw")
    with protect(optimizer, scope, [Retract("A"), ProjectDisplacement("A")]):
        train(scope, optimizer, 20)
    before = [p.detach().clone() for p in parameters(scope)]
    again = Scope(tuple(Site(s.layer, s.current, s.current.copy(), core=s.core) for s in scope.sites))
    with protect(optimizer, again, [Retract("A"), ProjectDisplacement("A")]):
        assert all(torch.equal(a, b) for a, b in zip(before, parameters(scope), strict=True))


def test_a_closure_is_followed_gradients_are_projected_before_the_move():
    """Under plain SGD, projecting the gradient alone keeps the move off the core: if it happens after the closure."""
    scope = scope_of()
    optimizer = optimizer_for(scope, "sgd")

    def closure():
        optimizer.zero_grad()
        loss = task_loss(scope)
        loss.backward()
        return loss

    with protect(optimizer, scope, [ProjectGradient("A")]):
        for _ in range(20):
            assert float(optimizer.step(closure).detach()) > 0
    for site in scope.sites:
        moved = site.factor("A").detach().double() - site.start("A").double()
        assert float((moved @ site.core.basis.double()).norm()) <= 1e-5 * float(moved.norm())


def test_an_optimizer_that_asks_for_gradients_twice_in_a_step_is_refused():
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step(closure)

    scope = scope_of()
    torch.optim.SGD(parameters(scope), lr=1e-3)  # from now on torch runs the hooks at the step of its base class too
    optimizer = Twice(parameters(scope), lr=1e-3)
    with protect(optimizer, scope, SFOR), pytest.raises(TypeError, match="Twice asked for gradients 2 times in a step"):
        optimizer.step(lambda: task_loss(scope))


class _Overriding(torch.optim.SGD):
    """Calls the step of its base class, as many an optimizer in the field does."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_that_calls_the_step_of_its_base_class_is_followed_once(closure):
    """torch runs the hooks for both classes once an optimizer of the base class was made anywhere."""
    scope, log = scope_of(), []
    torch.optim.SGD(parameters(scope), lr=1e-3)
    optimizer = _Overriding(parameters(scope), lr=1e-3)

    def loss():
        optimizer.zero_grad()
        made = task_loss(scope)
        made.backward()
        return made

    with protect(optimizer, scope, [Recording("a", log), *SFOR]) as held:
        for _ in range(20):
            if closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
        assert held.step == 20
    moments = ["arrived", "add_gradients", "before_step", "moved", "after_step"]
    assert log == [("a", moment) for _ in range(20) for moment in moments]
    for site in scope.sites:
        moved = site.factor("A").detach().double() - site.start("A").double()
        assert float(moved.norm()) > 0
        assert float((moved @ site.core.basis.double()).norm()) <= 1e-5 * float(moved.norm())


class _Failing(torch.optim.SGD):
    """Fails in its next step, like one that runs out of memory, after it moved as many parameters as told."""

    fail_after: int | None = None

    def step(self, closure=None):
        if self.fail_after is not None:
            for parameter in self.param_groups[0]["params"][: self.fail_after]:
                parameter.data.add_(1.0)
            self.fail_after = None
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("moved", [0, 1])
def test_a_loop_that_catches_a_failed_step_goes_on_under_protection(moved):
    """The next step projects the whole displacement of the task, so also what the failed one had moved."""
    scope = scope_of()
    optimizer = _Failing(parameters(scope), lr=1e-2)
    with protect(optimizer, scope, SFOR) as held:
        train(scope, optimizer, 3)
        optimizer.fail_after = moved
        with pytest.raises(RuntimeError, match="out of memory"):
            train(scope, optimizer, 1)
        train(scope, optimizer, 3)
        assert held.step == 6
    for site in scope.sites:
        displacement = site.factor("A").detach().double() - site.start("A").double()
        assert float((displacement @ site.core.basis.double()).norm()) <= 1e-5 * float(displacement.norm())


@pytest.mark.parametrize("caught", [True, False])
def test_what_a_failed_step_moved_is_projected_if_no_step_follows(caught):
    """Whether the loop goes on behind the failure or not: no look finds anything, and the factors keep the promise."""
    scope = scope_of()
    optimizer = _Failing(parameters(scope), lr=1e-2)
    failure = pytest.raises(RuntimeError, match="out of memory")
    with failure if not caught else nullcontext() as raised, protect(optimizer, scope, SFOR):
        train(scope, optimizer, 3)
        optimizer.fail_after = 1
        with failure if caught else nullcontext():
            train(scope, optimizer, 1)
    assert caught or not getattr(raised.value, "__notes__", [])
    for site in scope.sites:
        displacement = site.factor("A").detach().double() - site.start("A").double()
        assert float((displacement @ site.core.basis.double()).norm()) <= 1e-5 * float(displacement.norm())


def test_an_exception_carries_what_the_last_look_found_as_a_note():
    scope = scope_of()
    optimizer = optimizer_for(scope, "adamw")
    with pytest.raises(KeyError) as raised, protect(optimizer, scope, SFOR):
        train(scope, optimizer, 3)
        with torch.no_grad():
            scope.sites[1].factor("B")[0, 0] += 1.0
        raise KeyError("of the loop")
    assert re.fullmatch(
        r"protection was lost by step 3: the frozen factor B at layer1 has moved by 1.0e\+00, .*", *raised.value.__notes__
    )
    assert hooks_of(optimizer) == 0


@pytest.mark.parametrize(
    ("constraints", "warm_up"),
    [(SFOR, None), ([ProjectStep("A")], None), (SFOR, [ProjectDisplacement("A")]), ([Freeze("B")], [ProjectDisplacement("A")])],
    ids=["steps before the block", "steps before step-wise projection", "a block without Freeze", "Freeze alone"],
)
def test_factors_that_have_left_their_anchor_before_the_block_begins_are_refused(constraints, warm_up):
    scope = scope_of()
    optimizer = optimizer_for(scope, "adamw")
    with protect(optimizer, scope, warm_up or []):
        train(scope, optimizer, 3)
    moved = pytest.raises(ValueError, match=r"have moved since their anchor was made: .* at layer0 .*; make the Scope anew")
    with moved, protect(optimizer, scope, constraints):
        pass
    assert hooks_of(optimizer) == 0
    assert all(p.requires_grad for p in parameters(scope))


def test_a_second_block_on_one_anchor_goes_on_where_the_first_has_kept_the_promise():
    scope = scope_of()
    optimizer = optimizer_for(scope, "adamw")
    for _ in range(2):
        with protect(optimizer, scope, SFOR):
            train(scope, optimizer, 30)
    for site in scope.sites:
        assert on_core(site, displacement(site)) <= 1e-5 * float(displacement(site).norm())
