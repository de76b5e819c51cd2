"""Neighbors that start or freeze A: LoRA-FA, InfLoRA, KeepLoRA and LoRA-Null, against dense float64 references."""

import pytest
import torch

import models
from anchorlora import METHODS, Freeze, GradientStart, InputStart, NullStart, PerTask, Retract, Subspace, measure, protect
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
        (lambda count: iter(()), "InputStart got no example of the task"),
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


KEEP = METHODS["keep-lora"].constraints


def principal_of(layer, share):
    """The leading right singular directions of the frozen weight that hold a share of its energy, dense in float64."""
    _, sizes, right = torch.linalg.svd(layer.base_weight().double())
    held = sizes.square().cumsum(0) / sizes.square().sum()
    return right[: int((held < share).sum()) + 1].T


@pytest.mark.parametrize("protected", [True, False], ids=["a later task", "the first task"])
def test_keep_lora_starts_in_the_gradient_off_the_core_and_off_the_weights_principal_directions(stack, protected):
    model, ids = stack.model, texts(5)
    anchor = stack.anchor(cores=random_cores(model) if protected else {}, losses=losses_of(model, ids))
    sizes = {layer.name: float(layer.factor("A").detach().norm()) for layer in anchor.layers}
    with torch.no_grad():
        GradientStart(5, first_task=1, principal=0.4).begin_task(anchor)
    weights = [layer.whole.base.weight.requires_grad_() for layer in anchor.layers]
    gradients = torch.autograd.grad(sum(losses_of(model, ids)(5)), weights)
    for layer, g in zip(anchor.layers, gradients, strict=True):
        W = principal_of(layer, 0.4)
        off = torch.cat([W, layer.core.basis.double()], dim=1) if protected else W
        Q = torch.linalg.qr(off).Q
        outside = g.double() @ (torch.eye(len(Q)) - Q @ Q.T)
        A = layer.factor("A").detach().double()
        assert 1 <= W.shape[1] < 20
        assert float((A @ off).norm()) <= 1e-6 * float(A.norm())
        found = float((outside @ torch.linalg.qr(A.T).Q).norm())
        assert found >= (1 - 1e-4) * float(torch.linalg.svdvals(outside)[:4].norm())
        assert torch.allclose(A @ A.T, torch.eye(4, dtype=torch.float64) * sizes[layer.name] ** 2 / 4, atol=1e-6)
        assert torch.equal(layer.start_factor("A"), layer.factor("A"))


def test_a_keep_lora_block_changes_nothing_on_the_core_or_the_weights_principal_directions(stack):
    model, ids = stack.model, texts(4)
    anchor = stack.anchor(cores=random_cores(model), losses=losses_of(model, ids))
    optimizer = torch.optim.AdamW(stack.trainable(), lr=1e-2, weight_decay=0.1)
    with protect(optimizer, anchor, KEEP):
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert measure(anchor).exact
    for layer in anchor.layers:
        A, B = (layer.factor(each).detach().double() for each in "AB")
        assert float((B @ A).norm()) > 1e-3
        assert float((B @ A @ principal_of(layer, 0.6)).norm()) <= 1e-6 * float(B.norm() * A.norm())


def test_a_layer_that_the_task_does_not_use_still_starts_off_the_weights_principal_directions(stack):
    model, ids = stack.model, texts(2)
    anchor = stack.anchor(losses=lambda count: (0.0 * loss for loss in losses_of(model, ids)(count)))
    drawn = {layer.name: layer.factor("A").detach().double().clone() for layer in anchor.layers}
    with torch.no_grad():
        GradientStart(2, first_task=1, principal=0.4).begin_task(anchor)
    for layer in anchor.layers:
        W, A = principal_of(layer, 0.4), layer.factor("A").detach().double()
        outside = drawn[layer.name] - drawn[layer.name] @ W @ W.T
        assert torch.allclose(A / A.norm(), outside / outside.norm(), atol=1e-6)


def test_a_share_that_leaves_nothing_to_read_is_refused(stack):
    anchor = stack.anchor(losses=losses_of(stack.model, texts(1)))
    with pytest.raises(ValueError, match="leave A nothing to read; use a smaller share"):
        GradientStart(1, principal=0.9999999999).begin_task(anchor)
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"GradientStart\(principal=..\) is a share, from 0 to below 1"):
            GradientStart(principal=share)


def null_memory(stack, *tasks):
    """What `NullStart` remembers of tasks, one after the other."""
    past = {}
    for ids in tasks:
        past = NullStart(len(ids)).end_task(stack.anchor(past=past, losses=losses_of(stack.model, ids)))
    return past


def test_lora_null_starts_where_the_inputs_of_all_finished_tasks_are_weakest(stack):
    model, tasks = stack.model, (texts(9)[:5], texts(9)[5:])
    past = null_memory(stack, *tasks)
    anchor = stack.anchor(past=past)
    before = model(input_ids=tasks[0]).logits
    with torch.no_grad():
        NullStart().begin_task(anchor)
    assert torch.equal(model(input_ids=tasks[0]).logits, before)
    X = inputs_of(model, torch.cat(tasks))
    for layer in anchor.layers:
        A, sizes = layer.factor("A").detach().double(), torch.linalg.svdvals(X[layer.name])
        assert torch.allclose(3 * A @ A.T, torch.eye(4, dtype=torch.float64), atol=1e-5)
        assert float((3**0.5 * X[layer.name] @ A.T).norm()) <= 1.001 * float(sizes[-4:].norm()) + 1e-6 * float(sizes.norm())
        assert torch.equal(layer.start_factor("A"), layer.factor("A"))
    assert float(sizes[-1]) > 1e-3 * float(sizes[0])  # the last layer's inputs use every direction, some of them hardly


def test_inputs_of_few_directions_leave_a_start_that_reads_none_of_them(stack):
    ids = texts(1, length=3)
    anchor = stack.anchor(past=null_memory(stack, ids))
    with torch.no_grad():
        NullStart().begin_task(anchor)
    X = inputs_of(stack.model, ids)
    for layer in anchor.layers:
        A = layer.factor("A").detach().double()
        assert float((X[layer.name] @ A.T).norm()) <= 1e-6 * float(X[layer.name].norm() * A.norm())
        assert torch.allclose(3 * A @ A.T, torch.eye(4, dtype=torch.float64), atol=1e-5)


def test_lora_null_with_a_frozen_promises_what_lora_fa_retract_does_and_alone_nothing():
    frozen = PerTask() + NullStart() + Retract("A") + Freeze("A", first_task=1)
    assert frozen.preserves == METHODS["lora-fa-retract"].preserves
    assert METHODS["lora-null"].preserves.words == "none"
    assert METHODS["lora-null"].reads_past


def test_a_start_without_memory_or_of_a_learned_anchor_is_refused(stack):
    with pytest.raises(ValueError, match=r"NullStart knows no inputs of width 64 at .*: pass what its end_task\(\) returned"):
        NullStart().begin_task(stack.anchor())
    with pytest.raises(ValueError, match="NullStart got no example of the task"):
        NullStart().end_task(stack.anchor(losses=lambda count: iter(())))
    with pytest.raises(ValueError, match="NullStart would change the function at layer0: B is not zero there"):
        NullStart().begin_task(anchor_of())
