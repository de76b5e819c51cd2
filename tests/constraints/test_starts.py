"""Neighbors that freeze A: LoRA-FA, and InfLoRA's design of A from the new task's inputs, against dense float64 references."""

import pytest
import torch

import models
from anchorlora import Freeze, InputStart, Retract, Subspace, measure, protect
from anchorlora.adapters import AdapterStack, lora_layers
from toys import OPTIMIZERS, anchor_of, optimizer_for, task_loss

LENGTH = 9


@pytest.fixture
def stack():
    """A learned history, and a new block on it."""
    torch.manual_seed(2)
    stack = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    stack.open(torch.Generator().manual_seed(5))
    with torch.no_grad():
        for p in stack.trainable():
            p.add_(0.05 * torch.randn(p.shape))
    stack.fold()
    stack.open(torch.Generator().manual_seed(6))
    stack.model.eval()
    return stack


def texts(count, length=LENGTH):
    return torch.randint(0, 60, (count, length), generator=torch.Generator().manual_seed(1))


def losses_of(model, ids):
    def losses(count):
        for row in ids[:count]:
            yield model(input_ids=row[None], labels=row[None]).loss

    return losses


def inputs_of(model, ids):
    """X of every layer, dense in float64."""
    seen = {name: [] for name in lora_layers(model)}
    hooks = [
        module.register_forward_pre_hook(lambda m, args, name=name: seen[name].append(args[0].detach()[0].double()))
        for name, module in lora_layers(model).items()
    ]
    for row in ids:
        model(input_ids=row[None])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def random_cores(model, k=3):
    draw = torch.Generator().manual_seed(3)
    return {
        name: Subspace(torch.linalg.qr(torch.randn(module.in_features, k, generator=draw)).Q)
        for name, module in lora_layers(model).items()
    }


@pytest.mark.parametrize("protected", [True, False], ids=["a later task", "the first task"])
def test_the_design_is_the_leading_singular_directions_of_the_inputs_outside_the_core(stack, protected):
    model, ids = stack.model, texts(5)
    cores = random_cores(model) if protected else {}
    anchor = stack.anchor(cores=cores, losses=losses_of(model, ids))
    before = model(input_ids=ids).logits
    model.train()
    with torch.no_grad():
        InputStart(5).begin_task(anchor)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model.eval()(input_ids=ids).logits, before)
    X = inputs_of(model, ids)
    for layer in anchor.layers:
        A = layer.factor("A").detach().double()
        V = layer.core.basis.double() if protected else torch.zeros(A.shape[1], 0, dtype=torch.float64)
        _, sizes, right = torch.linalg.svd(X[layer.name] @ (torch.eye(A.shape[1]) - V @ V.T))
        gaps = sizes[:4] / sizes[1:5]
        assert float(gaps.min()) > 1.001  # each direction is its own
        assert torch.allclose((3**0.5 * A * right[:4]).sum(1).abs(), torch.ones(4, dtype=torch.float64), atol=1e-4)
        assert torch.allclose(3 * A @ A.T, torch.eye(4, dtype=torch.float64), atol=1e-5)
        assert float((A @ V).norm()) <= 1e-6 * float(A.norm())
        assert torch.equal(layer.start_factor("A"), layer.factor("A"))


def test_inputs_of_fewer_directions_than_rows_leave_the_other_rows_as_drawn_outside_the_core(stack):
    ids = texts(1, length=2)
    cores = random_cores(stack.model)
    anchor = stack.anchor(cores=cores, losses=losses_of(stack.model, ids))
    drawn = {layer.name: layer.factor("A").detach().clone() for layer in anchor.layers}
    with torch.no_grad():
        InputStart().begin_task(anchor)
    X = inputs_of(stack.model, ids)
    for layer in anchor.layers:
        A = layer.factor("A").detach()
        assert len(X[layer.name]) == 2
        assert torch.allclose(A[2:], layer.core.outside(drawn[layer.name][2:]), atol=1e-6)
        assert float(layer.core.coordinates(A).norm()) <= 1e-6 * float(A.norm())


def test_inputs_on_the_core_alone_leave_a_as_drawn_outside_it(stack):
    """What rounding leaves of them outside the core is no direction of the task."""
    ids = texts(1, length=2)
    cores = {name: Subspace(torch.linalg.qr(X.T.float()).Q) for name, X in inputs_of(stack.model, ids).items()}
    anchor = stack.anchor(cores=cores, losses=losses_of(stack.model, ids))
    drawn = {layer.name: layer.factor("A").detach().clone() for layer in anchor.layers}
    with torch.no_grad():
        InputStart().begin_task(anchor)
    for layer in anchor.layers:
        assert torch.allclose(layer.factor("A").detach(), layer.core.outside(drawn[layer.name]), atol=1e-6)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (None, r"InputStart needs losses of single examples of the task; pass losses= to Anchor\.of"),
        (lambda count: iter(()), "InputStart got no example of the new task"),
    ],
)
def test_a_design_without_inputs_is_refused(stack, losses, said):
    with pytest.raises(ValueError, match=said):
        InputStart().begin_task(stack.anchor(losses=losses))


def test_a_design_of_a_learned_anchor_is_refused():
    with pytest.raises(ValueError, match="InputStart would change the function at layer0: B is not zero there"):
        InputStart().begin_task(anchor_of())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_retracted_and_frozen_a_keeps_the_response_under_every_optimizer_while_b_moves(name):
    anchor = anchor_of(fresh=True)
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [Retract("A"), Freeze("A", first_task=1)]):
        for step in range(10):
            optimizer.zero_grad()
            task_loss(anchor, seed=step % 3).backward()
            optimizer.step()
    drift = measure(anchor)
    assert drift.exact, (drift.rho, drift.bound)
    for layer in anchor.layers:
        A, B = (layer.factor(each).detach().double() for each in "AB")
        assert torch.equal(layer.factor("A"), layer.start_factor("A"))
        dense = B @ A
        assert float(dense.norm()) > 1e-3
        assert float((dense @ layer.core.basis.double()).norm()) <= 1e-6 * float(B.norm() * A.norm())


def test_a_designed_block_trains_in_a_loop_of_ones_own_and_stays_exact(stack):
    model, ids = stack.model, texts(4)
    anchor = stack.anchor(cores=random_cores(model), losses=losses_of(model, ids))
    optimizer = torch.optim.AdamW(stack.trainable(), lr=1e-2, weight_decay=0.1)
    with protect(optimizer, anchor, [InputStart(4), Retract("A"), Freeze("A", first_task=1)]):
        losses = []
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert measure(anchor).exact
    assert all(torch.equal(layer.factor("A"), layer.start_factor("A")) for layer in anchor.layers)
