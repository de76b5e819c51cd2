"""Adapters that were made elsewhere go on as histories: other scales, ranks and dtypes, read as PEFT reads them."""

import json
import shlex

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import models
from anchorlora import ProjectDisplacement, ProjectGradient, Retract, Subspace, measure, protect
from anchorlora.adapters import AdapterStack, lora_layers, read_adapter, write_adapter
from anchorlora.geometry import Factors

EPS = torch.finfo(torch.float32).eps
LAYER = "model.layers.1.self_attn.q_proj"
KINDS = {
    "plain": {"r": 8, "lora_alpha": 32},
    "another scale": {"r": 3, "lora_alpha": 7},
    "rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True},
    "rank pattern": {"r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 2, LAYER: 7}},
    "rank and alpha pattern": {"r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {LAYER: 3}},
    "expressions": {"r": 4, "lora_alpha": 8, "rank_pattern": {r".*\.1\.[^.]+\.v_proj": 2}, "alpha_pattern": {"^model.*0.*": 3}},
    "rslora with ranks": {"r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 9}, "use_rslora": True},
}


def base():
    torch.manual_seed(3)
    return models.qwen3()


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=models.tokens()).logits


def assert_alike(found, expected):
    assert torch.allclose(found, expected, rtol=0, atol=50 * EPS * float(expected.abs().max())), float(
        (found - expected).abs().max()
    )


@pytest.fixture(params=KINDS)
def foreign(request, tmp_path):
    """An adapter that PEFT alone made and saved, with content in every factor."""
    model = get_peft_model(base(), LoraConfig(target_modules=["q_proj", "v_proj"], **KINDS[request.param]))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=draw) / 5)
    model.save_pretrained(tmp_path / "foreign")
    return tmp_path / "foreign"


def continued(folder):
    blocks = AdapterStack(base(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    blocks.restore(read_adapter(folder), as_history=True)
    return blocks


def test_the_history_computes_what_peft_computes(foreign):
    assert_alike(logits(continued(foreign).model), logits(PeftModel.from_pretrained(base(), foreign)))


def test_a_rescaled_factor_is_rounded_once_and_a_missing_row_is_zero(foreign):
    kept = continued(foreign).factors()
    ranks = {f.rank for f in kept.values()}
    assert len(ranks) == 1
    for layer, f in read_adapter(foreign).items():
        then, now = f.scale * f.B.double(), kept[layer].scale * kept[layer].B[:, : f.rank].double()
        assert torch.equal(kept[layer].A[: f.rank], f.A)
        assert bool(((now - then).abs() <= EPS / 2 * then.abs() * (1 + 1e-9)).all()), layer
        assert not kept[layer].A[f.rank :].any()
        assert not kept[layer].B[:, f.rank :].any()


def test_a_block_trained_on_top_is_protected_exactly_and_both_are_exported(foreign, tmp_path):
    blocks = continued(foreign)
    blocks.open(torch.Generator().manual_seed(5))
    draw = torch.Generator().manual_seed(6)
    cores = {name: Subspace(torch.linalg.qr(torch.randn(64, 9, generator=draw)).Q) for name in lora_layers(blocks.model)}
    anchor = blocks.anchor(cores=cores)
    optimizer = torch.optim.AdamW(blocks.trainable(), lr=1e-2, weight_decay=0.1)
    blocks.model.train()
    with protect(optimizer, anchor, [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]):
        for step in range(10):
            blocks.model(input_ids=models.tokens(seed=step), labels=models.tokens(seed=step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    drift = measure(anchor)
    assert drift.d_eff > 0.1
    assert drift.exact, f"rho {drift.rho:.1e}, zero is {drift.bound:.1e}"
    live = logits(blocks.model)
    write_adapter(tmp_path / "out", blocks.factors(), base=None)
    assert_alike(logits(PeftModel.from_pretrained(base(), tmp_path / "out")), live)
    blocks.fold()
    assert_alike(logits(blocks.model), live)


def test_layers_of_unlike_rank_and_scale_are_written_as_one_plain_adapter(foreign, tmp_path):
    saved = read_adapter(foreign)
    write_adapter(tmp_path / "copy", saved, base=None)
    copy = read_adapter(tmp_path / "copy")
    for layer, f in saved.items():
        assert torch.equal(copy[layer].A, f.A)
        assert torch.equal(copy[layer].B, f.B)
        assert copy[layer].scale == pytest.approx(f.scale, rel=1e-15)
    assert not json.loads((tmp_path / "copy/adapter_config.json").read_text())["use_rslora"]
    assert_alike(logits(PeftModel.from_pretrained(base(), tmp_path / "copy")), logits(PeftModel.from_pretrained(base(), foreign)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_factors_become_float32_without_a_change(dtype, tmp_path):
    layers = {name: (torch.randn(4, 64).to(dtype), torch.randn(w, 4).to(dtype)) for name, w in widths().items()}
    write_adapter(tmp_path / "a", {n: Factors(A, B, 4.0) for n, (A, B) in layers.items()}, base=None)
    file = tmp_path / "a/adapter_model.safetensors"
    save_file({k: t.to(dtype) for k, t in load_file(file).items()}, file)
    blocks = continued(tmp_path / "a")
    for layer, f in blocks.factors().items():
        assert f.A.dtype == torch.float32
        assert torch.equal(f.A, layers[layer][0].float())
        assert torch.equal(f.B, layers[layer][1].float())
    blocks.open(torch.Generator().manual_seed(0))
    blocks.fold()  # the history is compared with what it was


def widths():
    return {f"model.layers.{i}.self_attn.{name}": w for i in range(2) for name, w in (("q_proj", 64), ("v_proj", 32))}


def test_a_shared_block_takes_another_scale_and_refuses_another_rank():
    blocks = AdapterStack(base(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    saved = {name: Factors(torch.randn(4, 64), torch.randn(w, 4), 3.0) for name, w in widths().items()}
    blocks.restore(saved, as_history=False)
    for layer, f in blocks.factors().items():
        assert torch.allclose(f.scale * f.B @ f.A, saved[layer].scale * saved[layer].B @ saved[layer].A, rtol=0, atol=1e-4)
    wide = {name: f.padded(6) for name, f in saved.items()}
    with pytest.raises(ValueError, match="the saved adapter has rank 6 and the shared adapter 4; restore it as history instead"):
        blocks.restore(wide, as_history=False)


@pytest.fixture
def plain(tmp_path):
    write_adapter(tmp_path / "a", {n: Factors(torch.randn(4, 64), torch.randn(w, 4), 4.0) for n, w in widths().items()}, base=None)
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', so the factors belong to a changed base"),
        ({"init_lora_weights": "loftq"}, "belong to a changed base"),
        ({"alora_invocation_tokens": [1, 2]}, "sets alora_invocation_tokens, so the update is not a product"),
        ({"use_qalora": True}, "sets use_qalora"),
        ({"lora_alpha": float("nan")}, "holds NaN, which is not a number"),
        ({"alpha_pattern": {"q_proj": "x"}}, "lora_alpha is 'x', not a number"),
    ],
)
def test_what_is_no_product_of_the_saved_factors_is_refused(plain, fields, message):
    path = plain / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        read_adapter(plain)


@pytest.mark.parametrize("name", ["adapter_model.bin", "weights.pt"])
def test_a_pickle_is_refused_with_the_command_that_converts_it(plain, name, monkeypatch):
    expected = load_file(plain / "adapter_model.safetensors")
    torch.save(expected, plain / name)
    (plain / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{name} is a pickle, which is not opened here; convert it: python -c") as refused:
        read_adapter(plain)
    command = str(refused.value).split("convert it: ")[1]
    assert not set(command) & set("$`!"), "a shell would put something else there"
    *python, code = shlex.split(command)
    assert python == ["python", "-c"]
    monkeypatch.chdir(plain)
    exec(code, {})
    assert all(torch.equal(t, expected[k]) for k, t in load_file(plain / "adapter_model.safetensors").items())
    assert len(read_adapter(plain)) == 4


def test_full_weights_are_no_adapter(plain):
    (plain / "adapter_model.safetensors").rename(plain / "model-00001-of-00002.safetensors")
    (plain / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="is missing; the folder holds a model's full weights, not an adapter"):
        read_adapter(plain)
