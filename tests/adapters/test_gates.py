"""Gated blocks against dense matrices: what they compute, what a boundary keeps, what is saved, what drift they cause."""

import pytest
import torch

import models
from anchorlora import GatedPerTask, Subspace, measure
from anchorlora.adapters import AdapterStack, lora_layers, write_adapter
from anchorlora.geometry import Factors
from anchorlora.methods import Boundary

PLAN = GatedPerTask(1e-2)
S = 4.0


def generator(seed):
    return torch.Generator().manual_seed(seed)


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=models.tokens()).logits


@pytest.fixture
def stack():
    """Two finished blocks and a third one under way, all gates moved away from their start."""
    torch.manual_seed(2)
    blocks = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    for task in (1, 2):
        PLAN.begin_task(blocks, generator(task), first=task == 1)
        wander(blocks, task)
        PLAN.end_task(blocks, Boundary())
    PLAN.begin_task(blocks, generator(3), first=False)
    return blocks


def wander(blocks, seed):
    draw = generator(100 + seed)
    with torch.no_grad():
        for group in PLAN.param_groups(blocks):
            for p in group["params"]:
                p.add_(0.1 * torch.randn(p.shape, generator=draw))


def dense(blocks):
    """s sum_j m_j B_j A_j of every layer, written out block by block in float64."""
    out, gates = {}, blocks.gates
    for layer, f in blocks.stacked().items():
        total = torch.zeros(f.B.shape[0], f.A.shape[1], dtype=torch.float64)
        for j in range(len(gates)):
            mine = slice(4 * j, 4 * j + 4)
            m = float(gates.values[j].detach()) / float(gates.sizes[j])
            total += S * m * f.B[:, mine].double() @ f.A[mine].double()
        out[layer] = total
    return out


def test_the_forward_is_the_gated_sum_of_all_blocks(stack):
    wander(stack, 3)
    with_gates = logits(stack.model)
    plain = models.qwen3()
    plain.load_state_dict({k.replace(".base_layer", ""): v for k, v in stack.base.state_dict().items() if "lora" not in k})
    with torch.no_grad():
        for layer, change in dense(stack).items():
            plain.get_submodule(layer).weight.add_(change.float())
    assert torch.allclose(with_gates, logits(plain), atol=1e-5 * float(with_gates.abs().max()))


def test_a_boundary_keeps_the_function_and_makes_a_direction_of_size_one(stack):
    wander(stack, 3)
    before, change = logits(stack.model), dense(stack)
    block = stack.newest()
    size = (sum((f.A.double().norm() * f.B.double().norm()) ** 2 for f in block.values()) / len(block)) ** 0.5
    PLAN.end_task(stack, Boundary())
    assert float(stack.gates.sizes[-1]) == pytest.approx(float(size), rel=1e-6)
    for layer, then in change.items():
        assert float((dense(stack)[layer] - then).norm()) <= 4 * torch.finfo(torch.float32).eps * float(then.norm())
    assert torch.allclose(logits(stack.model), before, atol=1e-5 * float(before.abs().max()))


def test_the_saved_adapter_has_the_gates_in_it(stack, tmp_path):
    from peft import PeftModel

    wander(stack, 3)
    PLAN.end_task(stack, Boundary())
    for layer, f in stack.factors().items():
        assert torch.allclose((f.scale * f.B @ f.A).double(), dense(stack)[layer], rtol=1e-4, atol=1e-6)
    write_adapter(tmp_path / "adapter", stack.factors(), base="")
    plain = models.qwen3()
    plain.load_state_dict({k.replace(".base_layer", ""): v for k, v in stack.base.state_dict().items() if "lora" not in k})
    loaded, mine = logits(PeftModel.from_pretrained(plain, tmp_path / "adapter")), logits(stack.model)
    assert torch.allclose(loaded, mine, atol=1e-5 * float(mine.abs().max()))


def test_drift_counts_old_blocks_whose_gates_moved_and_the_block_alone_apart(stack):
    cores = {name: Subspace(torch.linalg.qr(torch.randn(64, 10, generator=generator(9))).Q) for name in lora_layers(stack.model)}
    anchor, before, own_before = stack.anchor(cores=cores), dense(stack), own(stack)
    assert measure(anchor).rho is None
    wander(stack, 3)
    drift, moved = measure(anchor), {layer: now - before[layer] for layer, now in dense(stack).items()}
    eff = sum(dW.square().sum() for dW in moved.values()).sqrt()
    old = sum((dW @ cores[layer].basis.double()).square().sum() for layer, dW in moved.items()).sqrt()
    block = sum((now - own_before[layer]).square().sum() for layer, now in own(stack).items()).sqrt()
    assert drift.d_eff == pytest.approx(float(eff), rel=1e-6)
    assert drift.d_old == pytest.approx(float(old), rel=1e-6)
    assert drift.d_block == pytest.approx(float(block), rel=1e-6)
    assert abs(drift.d_block / drift.d_eff - 1) > 0.01


def own(stack):
    m = float(stack.gates.values[-1].detach())
    return {layer: S * m * f.B.double() @ f.A.double() for layer, f in stack.newest().items()}


def test_all_gates_train_and_with_a_rate_of_their_own(stack):
    optimizer = torch.optim.AdamW(PLAN.param_groups(stack), lr=1e-4, weight_decay=0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-4, 1e-2]
    wander(stack, 3)
    before = stack.gates.values.detach().clone()
    stack.model.train()
    stack.model(input_ids=models.tokens()).logits.square().mean().backward()
    optimizer.step()
    step = (stack.gates.values.detach() - before).abs()
    assert torch.allclose(step, torch.full_like(step, 1e-2), rtol=1e-3)
    history = [p for name, p in stack.model.named_parameters() if ".history." in name]
    assert history
    assert not any(p.requires_grad or p.grad is not None for p in history)


def test_a_stack_goes_on_from_what_was_saved_bitwise(stack):
    wander(stack, 3)
    PLAN.end_task(stack, Boundary())
    state, factors = PLAN.state(stack), stack.factors()
    torch.manual_seed(2)
    again = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    PLAN.resume(again, factors, state)
    assert torch.equal(logits(again.model), logits(stack.model))
    for blocks in (stack, again):
        PLAN.begin_task(blocks, generator(4), first=False)
        wander(blocks, 4)
    assert torch.equal(logits(again.model), logits(stack.model))


def test_a_block_that_never_moved_has_no_direction_and_keeps_its_gate():
    torch.manual_seed(2)
    blocks = AdapterStack(models.qwen3(), targets=("q_proj",), rank=4, alpha=16)
    PLAN.begin_task(blocks, generator(1), first=True)
    PLAN.end_task(blocks, Boundary())
    assert blocks.gates.values.tolist() == pytest.approx([0.8])
    assert blocks.gates.sizes.tolist() == [1.0]
    assert all(isinstance(f, Factors) and not f.B.any() for f in blocks.factors().values())
