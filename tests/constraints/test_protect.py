import copy
import re
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState

import models
from anchorlora import (
    METHODS,
    AdaptedLayer,
    Anchor,
    AnswerSensitivity,
    Distillation,
    EffectiveResponse,
    EffectiveSparsity,
    FisherAnchor,
    Freeze,
    GradientStart,
    KroneckerBrake,
    NullStart,
    ProjectDisplacement,
    ProjectGradient,
    ProjectStep,
    Retract,
    RoutingOverlap,
    SensitiveCore,
    Subspace,
    measure,
    protect,
)
from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.constraints import ActiveConstraint, holds_factors
from anchorlora.errors import ProtectionLost
from anchorlora.geometry import Factors
from toys import anchor_of, anchored, displacement, norm, on_core, optimizer_for, parameters, task_loss, train


@dataclass(frozen=True)
class Recording:
    """Constrains nothing and writes down when it was called."""

    name: str
    log: list
    first_task = 2
    requires = ()

    def begin_task(self, anchor):
        return _Writing(self)

    def end_task(self, anchor):
        return {}


class _Writing(ActiveConstraint):
    def __init__(self, owner):
        self.owner = owner

    def after_backward(self):
        self.owner.log.append((self.owner.name, "after_backward"))

    def add_penalty_grads(self):
        self.owner.log.append((self.owner.name, "add_penalty_grads"))

    def before_optimizer_step(self):
        self.owner.log.append((self.owner.name, "before_optimizer_step"))

    def after_raw_update(self):
        self.owner.log.append((self.owner.name, "after_raw_update"))

    def after_optimizer_step(self):
        self.owner.log.append((self.owner.name, "after_optimizer_step"))


DEFAULTS = {
    ProjectGradient: {"factor": "A"},
    ProjectDisplacement: {"factor": "A"},
    ProjectStep: {"factor": "A"},
    Retract: {"factor": "A"},
    Freeze: {"factor": "B", "first_task": 2},
    RoutingOverlap: {"strength": 0.5},
    EffectiveResponse: {"strength": 1.0},
    EffectiveSparsity: {"strength": 1e-6},
    Distillation: {"strength": 1.0, "temperature": 2.0, "on": "new"},
    FisherAnchor: {"strength": 1e4, "examples": 500},
    AnswerSensitivity: {"examples": 64, "inputs": 64, "outputs": 32, "seed": 0, "alike": False},
    SensitiveCore: {"energy": 0.93, "at_least": 4, "at_most": 20},
    KroneckerBrake: {"strength": 30.0},
    GradientStart: {"examples": 64, "first_task": 2, "principal": 0.0},
    NullStart: {"examples": 64},
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_constraint_is_an_immutable_description_with_the_documented_defaults(kind):
    """Methods share them over tasks and runs, and compare them."""
    one = kind()
    assert vars(one) == DEFAULTS[kind]
    assert one.first_task == (1 if kind is EffectiveSparsity else 2)
    assert {one: "same"}[kind(**DEFAULTS[kind])] == "same"
    with pytest.raises(FrozenInstanceError):
        setattr(one, next(iter(DEFAULTS[kind])), None)


def hooks_of(optimizer):
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_each_moment_runs_over_all_constraints_before_the_next_begins():
    anchor, log = anchor_of(), []
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [Recording("a", log), Recording("b", log)]):
        train(anchor, optimizer, 1)
    hooks = ["after_backward", "add_penalty_grads", "before_optimizer_step", "after_raw_update", "after_optimizer_step"]
    assert log == [(name, moment) for moment in hooks for name in ("a", "b")]


def test_hooks_are_gone_after_the_block_and_after_an_exception_inside_it():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [ProjectDisplacement("A")]):
        assert hooks_of(optimizer) == 2
    assert hooks_of(optimizer) == 0
    for factor in ("A", "B"):
        with pytest.raises(KeyError), protect(optimizer, anchor, [Freeze(factor)]):
            raise KeyError
        assert hooks_of(optimizer) == 0
        assert all(p.requires_grad for p in parameters(anchor))


def test_a_block_that_is_never_entered_is_refused_at_the_first_step_until_one_is_entered():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    for _ in range(2):
        protect(optimizer, anchor, SFOR)  # on a line alone
    with pytest.raises(ValueError, match="was never entered, so nothing is protected; write `with protect"):
        train(anchor, optimizer, 1)
    with pytest.raises(TypeError, match="Linear is no torch optimizer"):
        protect(torch.nn.Linear(1, 1), anchor, SFOR)
    assert displacement(anchor.layers[0]).norm() == 0
    with protect(optimizer, anchor, SFOR):
        train(anchor, optimizer, 1)
    assert hooks_of(optimizer) == 0


def test_a_constraint_that_refuses_leaves_no_hook_and_no_frozen_factor():
    anchor = anchor_of()  # a learned anchor: retracting it would change the function
    optimizer = optimizer_for(anchor, "adamw")
    with (
        pytest.raises(ValueError, match="retracting A at layer0 would change the function"),
        protect(optimizer, anchor, [Freeze("B"), Retract("A")]),
    ):
        pass
    assert hooks_of(optimizer) == 0
    assert all(p.requires_grad for p in parameters(anchor))


def test_hooks_fire_once_per_real_step_under_accumulation():
    anchor, log = anchor_of(), []
    optimizer = optimizer_for(anchor, "adamw")
    GradientState._reset_state()  # a loop that stopped within its data would make every step count, in this process
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    module = torch.nn.ParameterList(parameters(anchor))
    module, wrapped = accelerator.prepare(module, optimizer)
    with protect(wrapped, anchor, [Recording("a", log)]):
        for _ in range(16):
            with accelerator.accumulate(module):
                accelerator.backward(task_loss(anchor))
                wrapped.step()
                wrapped.zero_grad()
    assert log.count(("a", "after_optimizer_step")) == 4


def test_gradients_are_switched_off_inside_hooks():
    anchor, seen = anchor_of(), []

    class Looking(_Writing):
        def after_optimizer_step(self):
            seen.append(torch.is_grad_enabled())

    class Look(Recording):
        def begin_task(self, anchor):
            return Looking(self)

    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [Look("x", [])]):
        train(anchor, optimizer, 1)
    assert seen == [False]


def test_a_constraint_that_needs_the_loss_is_refused_where_nobody_asks_for_it():
    class Losing(ActiveConstraint):
        def loss(self, batch, outputs):
            return torch.zeros(())

    class Distil(Recording):
        def begin_task(self, anchor):
            return Losing()

    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "sgd")
    with (
        protect(optimizer, anchor, [Distil("d", [])]),
        pytest.raises(TypeError, match="Losing adds to the loss, but this loop never asks"),
    ):
        train(anchor, optimizer, 1)
    with protect(optimizer, anchor, [Distil("d", [])]) as held:
        held[0].loss(None, None)
        train(anchor, optimizer, 1)


def test_an_optimizer_of_other_parameters_is_refused():
    anchor, other = anchor_of(), anchor_of(seed=3)
    with (
        pytest.raises(ValueError, match="factor A at layer0 trains but is not in this optimizer; build the optimizer from"),
        protect(optimizer_for(other, "adamw"), anchor, []),
    ):
        pass
    for held, missing in (("A", "B"), ("B", "A")):
        half = torch.optim.SGD([layer.factor(held) for layer in anchor.layers], lr=1.0)
        assert holds_factors(half, anchor)
        assert not holds_factors(half, other)
        refused = f"factor {missing} at layer0 trains but is not in this optimizer; one optimizer must hold all factors"
        with pytest.raises(ValueError, match=refused), protect(half, anchor, []):
            pass
    deep = copy.deepcopy(parameters(anchor))
    with pytest.raises(ValueError, match="not in this optimizer"), protect(torch.optim.SGD(deep, lr=1.0), anchor, []):
        pass
    with pytest.raises(TypeError, match=r"anchor is a Linear; give Anchor.of\(model, cores=cores\)"):
        protect(half, torch.nn.Linear(1, 1), []).__enter__()
    for wrong in (METHODS["sfor"], "sfor", [SFOR]):
        with pytest.raises(TypeError, match="a (Method|str|list) is no constraint; give a list of constraints"):
            protect(half, anchor, wrong)
    with pytest.raises(TypeError, match="Linear is no anchor; give the one that training began with"):
        measure(torch.nn.Linear(1, 1))


def test_optimizers_whose_steps_cannot_be_followed_are_refused():
    anchor = anchor_of()
    with (
        pytest.raises(TypeError, match="LBFGS moves the parameters several times"),
        protect(torch.optim.LBFGS(parameters(anchor)), anchor, []),
    ):
        pass
    with pytest.raises(TypeError, match="list is no torch optimizer"), protect([], anchor, []):
        pass
    first, *others = parameters(anchor)
    groups = [{"params": others}, {"params": [first], "differentiable": True}]
    with pytest.raises(TypeError, match="differentiable"), protect(torch.optim.SGD(groups, lr=1.0), anchor, []):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_factors_are_refused_with_the_remedy(dtype):
    anchor = anchor_of(dtype=dtype, fresh=True)
    optimizer = torch.optim.SGD(parameters(anchor), lr=1.0)
    for constraint in (ProjectDisplacement("A"), Retract("A")):
        with (
            pytest.raises(TypeError, match="needs float32 factors, but A at layer0 is .*autocast_adapter_dtype=True"),
            protect(optimizer, anchor, [constraint]),
        ):
            pass


def test_a_site_without_a_core_or_with_one_of_another_width_is_refused():
    layer = anchor_of().layers[0]
    optimizer = torch.optim.SGD([layer.factor("A"), layer.factor("B")], lr=1.0)
    bare = Anchor((AdaptedLayer(layer.name, layer.current, layer.start),))
    with (
        pytest.raises(ValueError, match="nothing is protected at layer0: it has no core"),
        protect(optimizer, bare, [ProjectGradient("A")]),
    ):
        pass
    odd = Anchor((AdaptedLayer(layer.name, layer.current, layer.start, core=anchor_of().layers[1].core),))
    with pytest.raises(ValueError, match="width 20, but its A reads 24"), protect(optimizer, odd, [ProjectDisplacement("A")]):
        pass


def test_displacement_projection_may_be_listed_before_retraction():
    anchor = anchor_of(fresh=True)
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [ProjectDisplacement("A"), Retract("A")]):
        train(anchor, optimizer, 20)
    for layer in anchor.layers:
        A = layer.factor("A").detach().double()
        assert float((A @ layer.core.basis.double()).norm()) <= 2 * torch.finfo(torch.float32).eps * float(A.norm())


def test_a_frozen_a_may_be_listed_before_its_retraction():
    """It was refused as having moved since its anchor, with the advice to make the anchor anew."""
    anchor = anchor_of(fresh=True)
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [Freeze("A"), Retract("A")]):
        train(anchor, optimizer, 5)
    for layer in anchor.layers:
        assert norm(displacement(layer)) == 0 < norm(layer.factor("B"))
        assert on_core(layer, layer.factor("A").detach()) <= 2 * torch.finfo(torch.float32).eps * norm(layer.factor("A"))


def test_an_unknown_factor_is_named():
    layer = anchor_of().layers[0]
    with pytest.raises(LookupError, match='factors "A" and "B", not \'C\''):
        layer.factor("C")


@pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
def test_a_skipped_step_of_a_gradient_scaler_calls_no_hook(name):
    anchor, log = anchor_of(), []
    optimizer = optimizer_for(anchor, name)  # a fused one is called, and skips the step itself
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with protect(optimizer, anchor, [Recording("a", log), ProjectGradient("A"), ProjectDisplacement("A")]) as protection:
        for step in range(6):
            scaler.scale(task_loss(anchor)).backward()
            if step in (1, 4):
                anchor.layers[0].factor("A").grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert log.count(("a", "after_optimizer_step")) == protection.step == 4


def test_fresh_factors_are_copied_into_the_anchor_not_shared_with_it():
    current = Factors(torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.zeros(4, 2)), 1.0)
    anchor = current.copy()
    with torch.no_grad():
        current.A.add_(1)
    assert torch.equal(anchor.A, torch.ones(2, 3))


SFOR = [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]


def test_hooks_that_others_take_off_are_missed_at_the_end():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    with pytest.raises(ProtectionLost, match="step hooks were removed"), protect(optimizer, anchor, SFOR):
        optimizer._optimizer_step_post_hooks.clear()
        train(anchor, optimizer, 1)


class _TwoCalls(torch.optim.Optimizer):
    """Makes a step in two calls, of which torch follows none, as sharpness-aware ones do."""

    def __init__(self, anchor):
        super().__init__(parameters(anchor), {})
        self.base_optimizer = optimizer_for(anchor, "adamw")

    def zero_grad(self, set_to_none=True):
        self.base_optimizer.zero_grad()

    def second_step(self):
        self.base_optimizer.step()


class _Lookahead(torch.optim.Optimizer):
    """Pulls the factors half of the way back to slow ones every third step."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.base_optimizer, self.slow, self.steps = optimizer, [p.detach().clone() for p in self.param_groups[0]["params"]], 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base_optimizer.step()
        self.steps += 1
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True) if self.steps % 3 == 0 else ():
            p.copy_(slow.lerp_(p, 0.5))


def test_another_optimizer_is_named_at_its_first_step_that_breaks_a_constraint():
    anchor = anchor_of()
    other = optimizer_for(anchor, "adam")
    lost = r"by step 0: \|dA V\| at layer0 is .*no step of the protected optimizer was seen, so another optimizer, Adam, moves it"
    with pytest.raises(ProtectionLost, match=lost), protect(optimizer_for(anchor, "adamw"), anchor, SFOR):
        train(anchor, other, 3)
    assert all(state["step"] == 1 for state in other.state.values())
    twice = _TwoCalls(anchored(anchor))
    with pytest.raises(ProtectionLost, match="so another optimizer, AdamW, moves it"), protect(twice, anchored(anchor), SFOR):
        task_loss(anchor).backward()
        twice.second_step()


def test_an_optimizer_around_the_protected_one_is_named_where_it_breaks_a_constraint_and_only_there():
    for inside in (False, True):
        anchor = anchor_of(fresh=True)
        base = optimizer_for(anchor, "adamw")
        around = _Lookahead(base)  # its slow factors are those before `Retract`
        lost = nullcontext() if inside else pytest.raises(ProtectionLost, match="by step 3: .*another optimizer, _Lookahead")
        with lost, protect(base, anchor, [Retract("A"), ProjectDisplacement("A")]):
            train(anchor, _Lookahead(base) if inside else around, 6)
    anchor = anchor_of(fresh=True)
    around = _Lookahead(optimizer_for(anchor, "adamw"))
    with protect(around, anchor, [Retract("A"), ProjectDisplacement("A")]) as held:
        train(anchor, around, 6)
        assert held.step == 6


class _Sign(torch.optim.Optimizer):
    """An optimizer whose step compiles as one graph; torch's own break theirs."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad.sign())


def test_the_compiled_step_of_an_optimizer_of_other_parameters_is_left_alone_and_that_of_the_factors_is_named():
    anchor, other = anchor_of(), torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    with protect(optimizer_for(anchor, "adamw"), anchor, SFOR):
        torch.compile(_Sign([other], {}).step, fullgraph=True, backend="eager")()
    assert torch.equal(other.detach(), torch.full((3,), 0.9))
    with pytest.raises(ProtectionLost, match="so another optimizer, _Sign"), protect(optimizer_for(anchor, "adamw"), anchor, SFOR):
        task_loss(anchor).backward()
        torch.compile(_Sign([layer.factor("A") for layer in anchor.layers], {}).step, backend="eager")()


def test_a_block_that_nobody_closes_does_not_look_at_a_later_protected_optimizer():
    anchor = anchor_of()
    first, second = optimizer_for(anchor, "adamw"), optimizer_for(anchor, "adamw")
    forgotten = protect(first, anchor, SFOR)
    forgotten.__enter__()
    others = [replace(layer, core=Subspace(torch.linalg.qr(torch.randn(layer.core.d, 3)).Q)) for layer in anchor.layers]
    with protect(second, anchored(Anchor(tuple(others))), SFOR):
        train(anchor, second, 2)
    with pytest.raises(ProtectionLost, match="no step of the protected optimizer was seen"):
        forgotten.__exit__(None, None, None)


def test_the_protected_optimizer_is_no_other_one_after_a_block_inside_the_block():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    lost = pytest.raises(ProtectionLost, match="by step 4: the frozen factor B .*, so another optimizer or program moves it")
    with lost, protect(optimizer, anchor, SFOR):
        with protect(optimizer, anchor, SFOR):
            train(anchor, optimizer, 3)
        with torch.no_grad():
            anchor.layers[1].factor("B").add_(1.0)
        train(anchor, optimizer, 1)


def test_parameters_taken_out_of_the_optimizer_are_noticed():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    with pytest.raises(ProtectionLost, match="no longer holds the factors of layer0"), protect(optimizer, anchor, SFOR):
        optimizer.param_groups[0]["params"] = parameters(anchor)[2:]


def test_factors_that_are_replaced_in_the_model_are_noticed():
    blocks = AdapterStack(models.qwen3(), targets=("q_proj",), rank=2, alpha=4)
    optimizer = torch.optim.AdamW(blocks.trainable())
    cores = {name: Subspace(torch.linalg.qr(torch.randn(64, 3)).Q) for name in lora_layers(blocks.model)}
    others = r"the factors of model\S*q_proj in the model are other parameters now"
    for given, lost in (({}, f"{others}.*before protecting it$"), ({"cores": cores}, rf"{others}; .*\|dA V\| at \S+ is 1\.4e\+00")):
        with pytest.raises(ProtectionLost, match=lost), protect(optimizer, blocks.anchor(**given), []):
            name, layer = next(iter(lora_layers(blocks.model).items()))
            routing = layer.lora_A["default"]
            kept = routing.weight
            routing.weight = torch.nn.Parameter(kept.detach() + cores[name].basis[:, 0])  # both rows move by one on the core
        routing.weight = kept


def test_what_another_program_writes_between_steps_is_noticed_after_the_second_step_and_then_now_and_then():
    for step, seen in ((1, "by step 2"), (4, "by step 5")):
        anchor = anchor_of()
        optimizer = optimizer_for(anchor, "adamw")
        lost = pytest.raises(ProtectionLost, match=f"{seen}: the frozen factor B at layer1 has moved")
        with lost, protect(optimizer, anchor, SFOR, check_every=5):
            train(anchor, optimizer, step)
            with torch.no_grad():
                anchor.layers[1].factor("B")[0, 0] += 1e-3
            train(anchor, optimizer, 3)


def test_an_exception_in_the_loop_is_not_covered_by_a_look_at_the_promises():
    anchor = anchor_of()
    with pytest.raises(KeyError), protect(optimizer_for(anchor, "adamw"), anchor, SFOR), torch.no_grad():
        anchor.layers[0].factor("A").add_(1.0)  # breaks the promise
        raise KeyError


def test_a_move_as_small_as_rounding_is_no_loss_of_protection():
    """A ratio alone would be of order one here."""
    anchor = anchor_of()
    optimizer = torch.optim.SGD(parameters(anchor), lr=1e-9)
    with protect(optimizer, anchor, SFOR):
        train(anchor, optimizer, 20)


def test_a_block_that_is_feasible_already_is_left_as_it_is_by_retraction():
    anchor = anchor_of(fresh=True)
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [Retract("A"), ProjectDisplacement("A")]):
        train(anchor, optimizer, 20)
    before = [p.detach().clone() for p in parameters(anchor)]
    again = Anchor(tuple(AdaptedLayer(s.name, s.current, s.current.copy(), core=s.core) for s in anchor.layers))
    with protect(optimizer, again, [Retract("A"), ProjectDisplacement("A")]):
        assert all(torch.equal(a, b) for a, b in zip(before, parameters(anchor), strict=True))


def test_every_layer_is_retracted_or_refused_by_its_own_state():
    """The first layer goes on from a feasible state, the second is new; one entry of B makes it old."""
    anchor = anchor_of(fresh=True)
    optimizer = torch.optim.SGD(parameters(anchor), lr=0.0)
    first, second = anchor.layers
    with torch.no_grad():
        first.factor("B").fill_(1.0)
        first.factor("A").copy_(first.core.outside(first.factor("A").double()))
    anchor = anchored(anchor)
    with protect(optimizer, anchor, [Retract("A"), ProjectDisplacement("A")]):
        assert on_core(second, second.factor("A").detach()) <= 2 * torch.finfo(torch.float32).eps * norm(second.factor("A"))
    other = anchor_of(fresh=True)
    with torch.no_grad():
        other.layers[1].factor("B")[2, 1] = 1e-3
    refused = pytest.raises(ValueError, match="retracting A at layer1 would change the function: B is not zero there")
    with refused, protect(torch.optim.SGD(parameters(other), lr=0.0), other, [Retract("A")]):
        pass


def test_a_closure_is_followed_gradients_are_projected_before_the_move():
    """Under plain SGD, projecting the gradient alone keeps the move off the core: if it happens after the closure."""
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "sgd")

    def closure():
        optimizer.zero_grad()
        loss = task_loss(anchor)
        loss.backward()
        return loss

    with protect(optimizer, anchor, [ProjectGradient("A")]):
        for _ in range(20):
            assert float(optimizer.step(closure).detach()) > 0
    for layer in anchor.layers:
        moved = layer.factor("A").detach().double() - layer.start_factor("A").double()
        assert float((moved @ layer.core.basis.double()).norm()) <= 1e-5 * float(moved.norm())


def test_an_optimizer_that_asks_for_gradients_twice_in_a_step_is_refused():
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            return super().step(closure)

    anchor = anchor_of()
    torch.optim.SGD(parameters(anchor), lr=1e-3)  # from now on torch runs the hooks at the step of its base class too
    optimizer = Twice(parameters(anchor), lr=1e-3)
    with protect(optimizer, anchor, SFOR), pytest.raises(TypeError, match="Twice asked for gradients 2 times in a step"):
        optimizer.step(lambda: task_loss(anchor))


class _Overriding(torch.optim.SGD):
    """Calls the step of its base class, as many an optimizer in the field does."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_step_within_the_backward_pass_is_refused():
    """As of optimizers that release each gradient at once; torch ended in an error about a write in place."""
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    parameters(anchor)[0].register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with protect(optimizer, anchor, SFOR), pytest.raises(TypeError, match="AdamW steps within the backward pass"):
        task_loss(anchor).backward()
    assert all(norm(displacement(layer)) == 0 for layer in anchor.layers)


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_that_calls_the_step_of_its_base_class_is_followed_once(closure):
    """torch runs the hooks for both classes once an optimizer of the base class was made anywhere."""
    anchor, log = anchor_of(), []
    torch.optim.SGD(parameters(anchor), lr=1e-3)
    optimizer = _Overriding(parameters(anchor), lr=1e-3)

    def loss():
        optimizer.zero_grad()
        made = task_loss(anchor)
        made.backward()
        return made

    with protect(optimizer, anchor, [Recording("a", log), *SFOR]) as held:
        for _ in range(20):
            if closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
        assert held.step == 20
    hooks = ["after_backward", "add_penalty_grads", "before_optimizer_step", "after_raw_update", "after_optimizer_step"]
    assert log == [("a", moment) for _ in range(20) for moment in hooks]
    for layer in anchor.layers:
        moved = layer.factor("A").detach().double() - layer.start_factor("A").double()
        assert float(moved.norm()) > 0
        assert float((moved @ layer.core.basis.double()).norm()) <= 1e-5 * float(moved.norm())


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
    anchor = anchor_of()
    optimizer = _Failing(parameters(anchor), lr=1e-2)
    with protect(optimizer, anchor, SFOR) as held:
        train(anchor, optimizer, 3)
        optimizer.fail_after = moved
        with pytest.raises(RuntimeError, match="out of memory"):
            train(anchor, optimizer, 1)
        train(anchor, optimizer, 3)
        assert held.step == 6
    for layer in anchor.layers:
        displacement = layer.factor("A").detach().double() - layer.start_factor("A").double()
        assert float((displacement @ layer.core.basis.double()).norm()) <= 1e-5 * float(displacement.norm())


@pytest.mark.parametrize("caught", [True, False])
def test_what_a_failed_step_moved_is_projected_if_no_step_follows(caught):
    """Whether the loop goes on behind the failure or not: no look finds anything, and the factors keep the promise."""
    anchor = anchor_of()
    optimizer = _Failing(parameters(anchor), lr=1e-2)
    failure = pytest.raises(RuntimeError, match="out of memory")
    with failure if not caught else nullcontext() as raised, protect(optimizer, anchor, SFOR):
        train(anchor, optimizer, 3)
        optimizer.fail_after = 1
        with failure if caught else nullcontext():
            train(anchor, optimizer, 1)
    assert caught or not getattr(raised.value, "__notes__", [])
    for layer in anchor.layers:
        displacement = layer.factor("A").detach().double() - layer.start_factor("A").double()
        assert float((displacement @ layer.core.basis.double()).norm()) <= 1e-5 * float(displacement.norm())


def test_a_look_before_a_checkpoint_projects_what_a_failed_step_moved_but_not_within_a_step():
    """As in a loop that was interrupted and saves inside the block; another program was blamed."""
    anchor = anchor_of()
    optimizer = _Failing(parameters(anchor), lr=1e-2)
    with protect(optimizer, anchor, SFOR) as held:
        train(anchor, optimizer, 3)
        optimizer.fail_after = 1
        with pytest.raises(RuntimeError, match="out of memory"):
            train(anchor, optimizer, 1)
        held.look()
        saved = [displacement(layer) for layer in anchor.layers]
    for layer, moved in zip(anchor.layers, saved, strict=True):
        assert on_core(layer, moved) <= 1e-5 * norm(moved)
    anchor = anchor_of()
    optimizer = _Overriding(parameters(anchor), lr=1e-2)
    with protect(optimizer, anchor, SFOR) as held:
        for _ in range(2):
            optimizer.step(lambda: (task_loss(anchor).backward(), held.look()))
        assert held.step == 2


def test_another_optimizer_in_place_of_the_protected_one_is_named_where_a_penalty_alone_acts():
    """There is no promise that its steps could break, so the penalty was left out without a word."""
    for both in (False, True):
        anchor = anchor_of()
        optimizer, other = optimizer_for(anchor, "adamw"), optimizer_for(anchor, "adam")
        lost = pytest.raises(ProtectionLost, match="by step 0: no step of the protected optimizer was seen, but Adam moved the fac")
        with nullcontext() if both else lost, protect(optimizer, anchor, [EffectiveSparsity(1e-3)]):
            train(anchor, other, 2)
            train(anchor, optimizer, int(both))
        assert hooks_of(optimizer) == 0


def test_an_exception_carries_what_the_last_look_found_as_a_note():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    with pytest.raises(KeyError) as raised, protect(optimizer, anchor, SFOR):
        train(anchor, optimizer, 3)
        with torch.no_grad():
            anchor.layers[1].factor("B")[0, 0] += 1.0
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
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, warm_up or []):
        train(anchor, optimizer, 3)
    moved = pytest.raises(ValueError, match=r"have moved since their anchor was made: .* at layer0 .*; make the Anchor anew")
    with moved, protect(optimizer, anchor, constraints):
        pass
    assert hooks_of(optimizer) == 0
    assert all(p.requires_grad for p in parameters(anchor))


def test_a_second_block_on_one_anchor_goes_on_where_the_first_has_kept_the_promise():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    for _ in range(2):
        with protect(optimizer, anchor, SFOR):
            train(anchor, optimizer, 30)
    for layer in anchor.layers:
        assert on_core(layer, displacement(layer)) <= 1e-5 * float(displacement(layer).norm())


def test_a_frozen_factor_that_is_zero_at_every_layer_is_refused_because_nothing_could_train():
    anchor = anchor_of(fresh=True)
    refused = r'B is zero at every layer and Freeze\("B"\) keeps it so: no update can leave zero; use Retract\("A"\)'
    with pytest.raises(ValueError, match=refused), protect(optimizer_for(anchor, "adamw"), anchor, SFOR):
        pass
    assert all(p.requires_grad for p in parameters(anchor))
    with torch.no_grad():
        anchor.layers[1].factor("B")[0, 0] = 1.0  # one layer can train: experts that no token reached stay zero
    anchor = anchored(anchor)
    with protect(optimizer_for(anchor, "adamw"), anchor, SFOR):
        pass


def test_a_frozen_factor_whose_companion_does_not_train_is_refused():
    """As with PEFT's LoRA-FA optimizer on a learned adapter; torch found no graph."""
    anchor, refused = anchor_of(), r'nothing can train: Freeze\("B"\) holds one factor'
    for layer in anchor.layers:
        layer.factor("A").requires_grad_(False)
    with pytest.raises(ValueError, match=refused), protect(optimizer_for(anchor, "adamw"), anchor, SFOR):
        pass
    assert all(layer.factor("B").requires_grad for layer in anchor.layers)


@pytest.mark.parametrize("constraints", [SFOR, [ProjectDisplacement("A")]])
def test_an_adapter_that_is_loaded_without_being_trainable_is_refused(constraints):
    anchor = anchor_of()
    for parameter in parameters(anchor):
        parameter.requires_grad_(False)
    refused = pytest.raises(ValueError, match="all factors are frozen; load the adapter with is_trainable=True")
    with refused, protect(optimizer_for(anchor, "adamw"), anchor, constraints):
        pass


def test_cores_may_be_tensors_with_orthonormal_columns():
    blocks = AdapterStack(models.qwen3(), targets=("q_proj",), rank=2, alpha=4)
    V = {name: torch.linalg.qr(torch.randn(64, 3)).Q for name in lora_layers(blocks.model)}
    name = next(iter(V))
    anchor = blocks.anchor(cores=V)
    assert torch.equal(anchor.layers[0].core.basis, V[name])
    assert measure(anchor, cores=V).rho is None
    for wrong, said in (
        (2 * V[name], "the columns of this basis are not orthonormal"),
        (V[name][:, 0], r"a basis has shape \(d, k\)"),
        (V[name].half(), "must be float32 or float64"),
        (V[name].tolist(), "is a list; give a Subspace, or a tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"the core of {re.escape(name)}:? .*{said}"):
            Anchor.of(blocks.model, cores={**V, name: wrong})


@pytest.mark.parametrize("fresh", [False, True])
def test_cores_that_leave_nothing_to_learn_in_are_refused_and_a_full_layer_is_warned_of(fresh):
    constraints = [Retract("A"), ProjectDisplacement("A")] if fresh else SFOR
    first, second = anchor_of(fresh=fresh).layers
    full = [replace(layer, core=Subspace(torch.eye(layer.core.d, dtype=torch.float64))) for layer in (first, second)]
    with pytest.raises(ValueError, match=r"every layer is full: all 24 directions .* protect fewer"):
        protect(optimizer_for(Anchor(tuple(full)), "adamw"), Anchor(tuple(full)), constraints).__enter__()
    mixed = Anchor((full[0], second))
    optimizer = optimizer_for(mixed, "adamw")
    warned = pytest.warns(UserWarning, match="nothing can be learned at layer0: all directions")
    with warned, protect(optimizer, mixed, constraints):
        train(mixed, optimizer, 3)
    changes = [norm(layer.change().left @ layer.change().right) for layer in mixed.layers]
    assert changes[0] < 1e-6 < changes[1]


def test_layers_that_share_a_factor_must_share_its_core():
    first, second = anchor_of(sizes=((24, 16), (24, 28))).layers
    shared = replace(second, current=Factors(first.current.A, second.current.B, second.current.scale))
    shared = replace(shared, start=shared.current.copy())
    anchor = Anchor((first, shared))
    optimizer = torch.optim.AdamW({id(p): p for p in parameters(anchor)}.values(), lr=1e-2)
    with pytest.raises(ValueError, match="layer0 and layer1 share one A, and each has a core of its own"):
        protect(optimizer, anchor, SFOR).__enter__()
    anchor = Anchor((first, replace(shared, core=Subspace.joining([first.core, second.core]))))
    with pytest.raises(ValueError, match="layer0 and layer1 share one A"):
        protect(optimizer, anchor, SFOR).__enter__()
    joined = Subspace.joining([first.core, second.core])
    anchor = Anchor(tuple(replace(layer, core=joined) for layer in anchor.layers))
    with protect(optimizer, anchor, SFOR):
        train(anchor, optimizer, 5)
    for layer, core in zip(anchor.layers, (first.core, second.core), strict=True):
        moved = displacement(layer)
        assert norm(moved @ core.basis.double()) <= 1e-6 < norm(moved)
