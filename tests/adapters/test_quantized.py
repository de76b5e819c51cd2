"""Blocks over a base that bitsandbytes holds in 4 or 8 bits: they train, protect exactly, and are exported as over any base."""

import pytest
import torch
from peft import PeftModel

import models
import oracle
from anchorlora import Freeze, ProjectDisplacement, ProjectGradient, Retract, RoutingOverlap, Subspace, measure, protect
from anchorlora.adapters import AdapterStack, attach, lora_layers, write_adapter
from anchorlora.config import BaseModelSettings
from anchorlora.models.load import load_base_model

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:bitsandbytes")

EPS = torch.finfo(torch.float32).eps
KINDS = ["nf4", "int8"]
O_LORA_HARD = [RoutingOverlap(0.5), Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]
SFOR = [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def load(small_model, kind):
    return load_base_model(BaseModelSettings(model=str(small_model), quantized=kind)).model


def blocks(small_model, kind):
    return AdapterStack(load(small_model, kind), targets=("q_proj", "v_proj"), rank=4, alpha=16)


def step(b, seed):
    ids = models.tokens(seed=seed)
    b.model(input_ids=ids, labels=ids).loss.backward()


def learn(b, anchor, constraints, seed, steps=8):
    optimizer = torch.optim.AdamW(b.trainable(), lr=1e-2, weight_decay=0.1)
    b.model.train()
    with protect(optimizer, anchor, constraints):
        for number in range(steps):
            step(b, 100 * seed + number)
            optimizer.step()
            optimizer.zero_grad()


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=models.tokens()).logits.float()


def cores(b):
    draw = torch.Generator().manual_seed(9)
    return {name: Subspace(torch.linalg.qr(torch.randn(64, 7, generator=draw)).Q) for name in lora_layers(b.model)}


@pytest.mark.parametrize("method", ["o-lora-hard", "sfor"])
def test_two_tasks_are_learned_with_exact_protection_and_exported(kind, method, small_model, tmp_path):
    b = blocks(small_model, kind)
    weights = {n: p.detach().clone() for n, p in b.model.named_parameters() if "lora_" not in n}
    assert any(p.dtype in (torch.uint8, torch.int8) for p in weights.values()), "the base is quantized"
    b.open(torch.Generator().manual_seed(1))
    learn(b, b.anchor(), [], seed=1)
    if method == "o-lora-hard":
        b.fold()
        b.open(torch.Generator().manual_seed(2))
    logits(b.model)  # tasks are tested between learning
    anchor = b.anchor(cores=cores(b))
    before = dense(b)
    learn(b, anchor, O_LORA_HARD if method == "o-lora-hard" else SFOR, seed=2)
    assert {p.dtype for n, p in b.model.named_parameters() if "lora_" in n} == {torch.float32}
    drift, changed = measure(anchor), {path: now - before[path] for path, now in dense(b).items()}
    expected = oracle.drift([(changed[layer.name], layer.core.basis) for layer in anchor.layers])
    assert drift.d_eff == pytest.approx(float(expected["d_eff"]), rel=1e-5)
    assert drift.d_eff > 0.1
    assert float(expected["rho"]) <= max(1e-7, 3 * drift.rho_floor), f"rho {float(expected['rho']):.1e}"
    assert drift.exact
    for name, p in b.model.named_parameters():
        assert name not in weights or torch.equal(p, weights[name]), name
    write_adapter(tmp_path / "a", b.factors(), base=None)
    live = logits(b.model)
    again = logits(attach(load(small_model, kind), tmp_path / "a"))
    assert float((again - live).abs().max()) <= ALIKE[kind] * float(live.abs().max())


# int8 rounds its inputs to 8 bits, where a difference of one float32 rounding may become one of 1/127
ALIKE = {"nf4": 50 * EPS, "int8": 1e-2}


def dense(b):
    return {layer: f.scale * f.B.double() @ f.A.double() for layer, f in b.factors().items()}


def test_a_history_is_one_frozen_block_and_folding_keeps_the_function(kind, small_model):
    b = blocks(small_model, kind)
    for task in range(2):
        b.open(torch.Generator().manual_seed(task))
        learn(b, b.anchor(), [], seed=task)
        before = logits(b.model)
        b.fold()
        assert float((logits(b.model) - before).abs().max()) <= ALIKE[kind] * float(before.abs().max())
    assert {layer.lora_A["history"].weight.shape[0] for layer in lora_layers(b.model).values()} == {8}


def test_gradients_after_a_forward_in_eval_mode_are_those_from_before(kind, small_model):
    """bitsandbytes packs 4-bit weights in eval mode on some processors, and then gradients would be dropped without a word."""
    found = []
    for tested in (False, True):
        b = blocks(small_model, kind)
        b.open(torch.Generator().manual_seed(1))
        if tested:
            logits(b.model)
        b.model.train()
        step(b, 5)
        found.append([p.grad for p in b.trainable()])
    assert all(g is not None and bool(torch.isfinite(g).all()) for g in found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert any(g.any() for g in found[0])


def test_a_base_that_is_packed_already_is_refused(small_model):
    model = load(small_model, "nf4")
    model.model.layers[0].self_attn.q_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(
        ValueError, match=r"q_proj has run in eval mode before, .* load the model again, and add the adapters first"
    ):
        AdapterStack(model, targets=("q_proj", "v_proj"), rank=4, alpha=16)


def test_plain_peft_loads_an_adapter_of_a_quantized_base_onto_the_full_one(small_model, tmp_path):
    b = blocks(small_model, "nf4")
    b.open(torch.Generator().manual_seed(1))
    learn(b, b.anchor(), [], seed=1)
    write_adapter(tmp_path / "a", b.factors(), base=None)
    full = load_base_model(BaseModelSettings(model=str(small_model))).model
    bare = logits(full)
    whole = logits(PeftModel.from_pretrained(full, tmp_path / "a"))
    assert float((whole - logits(b.model)).norm()) < 0.5 * float((whole - bare).norm()), "nearer to each other than to the base"
