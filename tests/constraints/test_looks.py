"""What is noticed while a block is protected, in loops of one's own; runs are tried in tests/faults."""

import pytest
import torch

from anchorlora import Freeze, ProjectDisplacement, ProjectGradient, ProjectStep, Retract, RoutingOverlap, Subspace, protect
from anchorlora.constraints.checks import off_core
from anchorlora.errors import NotFinite, ProtectionLost
from toys import anchor_of, optimizer_for, task_loss, train

EPS = torch.finfo(torch.float32).eps
SFOR = [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]


def test_factors_that_become_nan_are_not_passed_by_the_watch_whatever_is_promised():
    """A comparison with NaN is false, and a method may promise nothing about B."""
    for constraints in ([], [RoutingOverlap()], SFOR, [ProjectDisplacement("A")], [Retract("A"), ProjectDisplacement("A")]):
        for name in ("A", "B"):
            anchor = anchor_of(fresh=constraints is not SFOR, history=True)
            optimizer = optimizer_for(anchor, "adamw")
            lost = pytest.raises(NotFinite, match=f"factor {name} at layer0 holds NaN or infinite values by step 3")
            with lost, protect(optimizer, anchor, constraints):
                train(anchor, optimizer, 2)
                with torch.no_grad():
                    anchor.layers[0].factor(name)[0, 0] = float("nan")
                optimizer.step()


def test_an_infinite_gradient_that_no_scaler_skips_is_found_at_the_next_look():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "sgd")
    lost = pytest.raises(NotFinite, match="factor A at layer0 holds NaN or infinite values by step 2")
    with lost, protect(optimizer, anchor, SFOR):
        for _ in range(2):
            task_loss(anchor).backward()
            anchor.layers[0].factor("A").grad[0, 0] = float("inf")
            optimizer.step()


def test_a_loop_may_look_whenever_it_wants_to():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    with pytest.raises(ProtectionLost, match="by step 3: the frozen factor B"), protect(optimizer, anchor, SFOR) as held:
        train(anchor, optimizer, 3)
        held.look()
        assert held.step == 3
        with torch.no_grad():
            anchor.layers[1].factor("B")[0, 0] += 1e-3
        held.look()
        raise AssertionError("it looked away")


def test_every_step_may_be_verified():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    lost = pytest.raises(ProtectionLost, match="by step 4: the frozen factor B at layer1")
    with lost, protect(optimizer, anchor, SFOR, check_every=1):
        train(anchor, optimizer, 3)
        with torch.no_grad():
            anchor.layers[1].factor("B")[0, 0] += 1e-3
        train(anchor, optimizer, 1)
        raise AssertionError("it looked away")


def test_a_hook_that_is_left_alone_says_which_one_is_gone_instead_of_what_it_misses():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    lost = r"by step 6: the optimizer's step hooks were removed; .*\|dA V\| at layer0 is"
    with pytest.raises(ProtectionLost, match=lost), protect(optimizer, anchor, SFOR):
        train(anchor, optimizer, 5)
        optimizer._optimizer_step_pre_hooks.clear()
        train(anchor, optimizer, 1)
        raise AssertionError("it was not seen at once")


@pytest.mark.parametrize("name", ["A", "B"])
def test_factors_in_another_precision_stop_the_next_step(name):
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "sgd")
    lost = f"by step 4: factor {name} at layer1 was torch.float32 and is torch.bfloat16 now"
    with pytest.raises(ProtectionLost, match=lost), protect(optimizer, anchor, [ProjectDisplacement("A")]):
        train(anchor, optimizer, 4)
        factor = anchor.layers[1].factor(name)
        factor.data = factor.data.bfloat16()
        optimizer.step()
        raise AssertionError("it made a step")


def test_factors_that_were_moved_to_another_device_are_named_before_the_step():
    """As by a trainer that is given the optimizer, and moves the model then."""
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    moved = "factor A at layer0 was on meta and is on cpu now; move the model first, then protect it"
    with pytest.raises(ProtectionLost, match=moved), protect(optimizer, anchor, SFOR) as held:
        held.watch.stored = [(*factor, before | {"device": torch.device("meta")}) for *factor, before in held.watch.stored]
        train(anchor, optimizer, 1)


def test_what_is_written_after_a_step_is_seen_by_the_step_form_too():
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    lost = pytest.raises(ProtectionLost, match=r"by step 3: \|dA V\| of a step at layer1 is")
    with lost, protect(optimizer, anchor, [ProjectStep("A")]):
        train(anchor, optimizer, 3)
        with torch.no_grad():
            anchor.layers[1].factor("A").add_(0.1)


@pytest.mark.parametrize(
    ("rows", "factor", "allowed"), [(1e-3, 0.5, 8 * EPS * 0.5), (1e-3, 50.0, 8 * EPS * 50.0), (2.0, 0.5, 2e-5)]
)
def test_a_norm_on_the_core_may_be_eight_roundings_of_the_factor_or_a_small_part_of_the_rows(rows, factor, allowed):
    x = torch.zeros(2, 6, dtype=torch.float64)
    x[0, 0] = x[1, 3] = rows / 2**0.5  # half of the square lies on the core
    found, bound = off_core(x, Subspace(torch.eye(6, 2, dtype=torch.float64)), size=torch.tensor([[factor]]))
    assert found == pytest.approx(rows / 2**0.5, rel=1e-12)
    assert bound == pytest.approx(allowed, rel=1e-12)
