"""Gated blocks against dense matrices: what they compute, what a boundary keeps, what is saved, what drift they cause."""

import pytest
import torch

import models
from anchorlora import METHODS, GatedPerTask, ProjectDisplacement, Retract, Subspace, measure, protect
from anchorlora.adapters import AdapterStack, lora_layers, write_adapter
from anchorlora.errors import InvalidValue, ProtectionLost
from anchorlora.geometry import Factors
from anchorlora.methods import TaskEnd

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
        PLAN.end_task(blocks, TaskEnd())
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
    PLAN.end_task(stack, TaskEnd())
    assert float(stack.gates.sizes[-1]) == pytest.approx(float(size), rel=1e-6)
    for layer, then in change.items():
        assert float((dense(stack)[layer] - then).norm()) <= 4 * torch.finfo(torch.float32).eps * float(then.norm())
    assert torch.allclose(logits(stack.model), before, atol=1e-5 * float(before.abs().max()))


def test_the_saved_adapter_has_the_gates_in_it(stack, tmp_path):
    from peft import PeftModel

    wander(stack, 3)
    PLAN.end_task(stack, TaskEnd())
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


@pytest.mark.parametrize("part", ["base_layer.weight", "lora_A.history.weight", "lora_B.history.weight"])
def test_a_write_past_torchs_count_to_what_stands_beside_a_gated_block_stops_training(part, stack):
    """Such layers are tested on no rows."""
    cores = {name: Subspace(torch.eye(64)[:, :4]) for name in lora_layers(stack.model)}
    anchor, layer = stack.anchor(cores=cores), next(iter(lora_layers(stack.model).values()))
    optimizer = torch.optim.AdamW(PLAN.param_groups(stack), lr=1e-4)
    with (
        pytest.raises(ProtectionLost, match=f"q_proj.{part} has changed"),
        protect(optimizer, anchor, [Retract("A"), ProjectDisplacement("A")]),
    ):
        layer.get_parameter(part).data.add_(1e-3)
    assert not measure(anchor).exact


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
    PLAN.end_task(stack, TaskEnd())
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
    PLAN.end_task(blocks, TaskEnd())
    assert blocks.gates.values.tolist() == pytest.approx([0.8])
    assert blocks.gates.sizes.tolist() == [1.0]
    assert all(isinstance(f, Factors) and not f.B.any() for f in blocks.factors().values())


LAYERWISE = GatedPerTask(1e-2, normalize="layer")


@pytest.fixture
def layerwise():
    """Two finished blocks whose layers differ in size, and a third one under way."""
    torch.manual_seed(2)
    blocks = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    for task in (1, 2):
        LAYERWISE.begin_task(blocks, generator(task), first=task == 1)
        wander(blocks, task)
        with torch.no_grad():
            for i, module in enumerate(lora_layers(blocks.model).values()):
                module.lora_B["default"].weight.mul_(1 + i)
        LAYERWISE.end_task(blocks, TaskEnd())
    LAYERWISE.begin_task(blocks, generator(3), first=False)
    return blocks


def saved(blocks):
    """s B A of every layer as it would be saved, in float64."""
    return {layer: f.scale * f.B.double() @ f.A.double() for layer, f in blocks.factors().items()}


def test_normalized_by_layer_a_boundary_keeps_the_function(layerwise):
    wander(layerwise, 3)
    before, change = logits(layerwise.model), saved(layerwise)
    LAYERWISE.end_task(layerwise, TaskEnd())
    for layer, then in change.items():
        assert float((saved(layerwise)[layer] - then).norm()) <= 8 * torch.finfo(torch.float32).eps * float(then.norm())
    assert torch.allclose(logits(layerwise.model), before, atol=1e-5 * float(before.abs().max()))


@pytest.mark.parametrize("normalize", ["layer", "network"])
def test_a_step_of_a_gate_moves_every_layer_by_a_direction_of_size_one_or_by_its_own_size(layerwise, stack, normalize):
    blocks = layerwise if normalize == "layer" else stack
    before, parts = saved(blocks), blocks.stacked()
    sizes = {layer: float(f.A[:4].double().norm() * f.B[:, :4].double().norm()) for layer, f in parts.items()}
    with torch.no_grad():
        blocks.gates.values[0] += 0.25
    whole = (sum(size**2 for size in sizes.values()) / len(sizes)) ** 0.5
    for layer, now in saved(blocks).items():
        f = parts[layer]
        divisor = sizes[layer] if normalize == "layer" else whole
        expected = 0.25 * S * f.B[:, :4].double() @ f.A[:4].double() / divisor
        assert torch.allclose(now - before[layer], expected, rtol=1e-3, atol=1e-5)


def test_normalized_by_layer_the_forward_and_the_drift_are_those_of_what_is_saved(layerwise):
    cores = {n: Subspace(torch.linalg.qr(torch.randn(64, 10, generator=generator(9))).Q) for n in lora_layers(layerwise.model)}
    anchor, before = layerwise.anchor(cores=cores), saved(layerwise)
    wander(layerwise, 3)
    with_gates, moved = logits(layerwise.model), {layer: now - before[layer] for layer, now in saved(layerwise).items()}
    eff = sum(dW.square().sum() for dW in moved.values()).sqrt()
    assert measure(anchor).d_eff == pytest.approx(float(eff), rel=1e-5)
    plain, whole = models.qwen3(), saved(layerwise)
    plain.load_state_dict({k.replace(".base_layer", ""): v for k, v in layerwise.base.state_dict().items() if "lora" not in k})
    with torch.no_grad():
        for layer, change in whole.items():
            plain.get_submodule(layer).weight.add_(change.float())
    assert torch.allclose(with_gates, logits(plain), atol=1e-5 * float(with_gates.abs().max()))


def test_normalized_by_layer_a_stack_goes_on_from_what_was_saved_bitwise(layerwise):
    wander(layerwise, 3)
    LAYERWISE.end_task(layerwise, TaskEnd())
    state, factors = LAYERWISE.state(layerwise), layerwise.factors()
    torch.manual_seed(2)
    again = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    LAYERWISE.resume(again, factors, state)
    for blocks in (layerwise, again):
        LAYERWISE.begin_task(blocks, generator(4), first=False)
        wander(blocks, 4)
    assert torch.equal(logits(again.model), logits(layerwise.model))
    state.pop(next(name for name in state if name.startswith("offset/")))
    with pytest.raises(KeyError, match="offset/"):
        LAYERWISE.resume(again, factors, state)


def test_by_what_a_block_is_normalized_stands_in_the_definition_where_it_is_not_the_default():
    assert METHODS["sd-lora"].definition == "GatedPerTask(0.01, 0.8)"
    assert METHODS["sd-lora-per-layer"].definition == "GatedPerTask(0.01, 0.8, normalize='layer')"
    with pytest.raises(InvalidValue, match="'network' or by 'layer', not by 'rows'"):
        GatedPerTask(normalize="rows")
