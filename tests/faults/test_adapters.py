"""Whatever a stranger wrote into an adapter's configuration, the adapter is put on as its weights are, or refused in one line."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from anchorlora import Subspace
from anchorlora.adapters import attach, lora_layers, write_adapter
from anchorlora.cli.app import main
from anchorlora.features import write_cores
from anchorlora.geometry import Factors

LAYERS = {"model.layers.0.self_attn.q_proj": 64, "model.layers.1.self_attn.v_proj": 32}
REFUSED = {
    "a negative rank": {"r": -1},
    "a rank of text": {"r": "x"},
    "a rank of 10^12": {"r": 10**12},
    "a rank that is true": {"r": True},
    "another rank": {"r": 3},
    "a rank of text by pattern": {"rank_pattern": {"q_proj": "x"}},
    "a huge rank by pattern": {"rank_pattern": {"model.layers.0.self_attn.q_proj": 10**12}},
    "ranks in a list": {"rank_pattern": [1]},
    "alpha of text by pattern": {"alpha_pattern": {"q_proj": "x"}},
    "alpha beyond float32": {"alpha_pattern": {"q_proj": 1e308}},
    "an alpha of text": {"lora_alpha": "x"},
    "layers twice": {"layer_replication": [[0, 10**6]]},
    "layers by no number": {"layers_to_transform": "x"},
    "layers by another number": {"layers_to_transform": [1]},
    "tokens": {"trainable_token_indices": [10**9]},
    "modules": {"modules_to_save": ["lm_head"]},
    "parameters": {"target_parameters": ["q_proj.weight"]},
    "no target": {"target_modules": []},
    "one target of two": {"target_modules": ["q_proj"]},
    "a number for a target": {"target_modules": 5},
    "a target that is left out": {"exclude_modules": ["v_proj"]},
    "a number for what is left out": {"exclude_modules": 5},
    "a number among what is left out": {"exclude_modules": ["v_proj", 5]},
    "a changed base": {"init_lora_weights": "pissa"},
}
WITHOUT_EFFECT = {
    "a regular expression for the targets, which the weights stand for": {"target_modules": "(([a-z])+.)+[A-Z]([a-z])+$"},
    "bias": {"bias": "nosuch"},
    "dropout": {"lora_dropout": "x"},
    "a start of 5": {"init_lora_weights": 5},
    "a start by data": {"init_lora_weights": "eva", "eva_config": {"rho": "x"}},
    "a cache": {"corda_config": {"cache_file": "/nowhere/x.pt"}},
    "quantization": {"loftq_config": {"a": 1}},
    "a task": {"task_type": "NOSUCH"},
    "a part of the program": {"megatron_core": "antigravity"},
    "offloading": {"runtime_config": {"ephemeral_gpu_offload": 1, "x": 2}},
    "an unknown field": {"nosuch": {"a": [1]}},
}


def adapter(root, change):
    draw = torch.Generator().manual_seed(1)
    factors = {n: Factors(torch.randn(2, 64, generator=draw), torch.randn(w, 2, generator=draw), 0.3) for n, w in LAYERS.items()}
    write_adapter(root / "a", factors, base="m")
    config = root / "a/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": ["q_proj", "v_proj"]} | change))
    return root / "a", factors


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_configuration_that_does_not_describe_the_weights_is_refused_by_field(change, tmp_path):
    folder, _ = adapter(tmp_path, change | {"target_modules": change.get("target_modules", sorted({"q_proj", "v_proj"}))})
    model, began = models.qwen3(), time.process_time()
    field = "lora_alpha" if "alpha_pattern" in change else next(iter(change))
    with pytest.raises(ValueError, match=rf"^\S*adapter_config\.json.*{field}") as refused:
        attach(model, folder)
    assert time.process_time() - began < 1
    assert "\n" not in str(refused.value)


def scaled(folder, A=1.0, B=1.0, dtype=torch.float32):
    file = folder / "adapter_model.safetensors"
    save_file({n: (t.double() * (A if "lora_A" in n else B)).to(dtype) for n, t in load_file(file).items()}, file)


TOO_LARGE = {
    "alpha": ({"lora_alpha": 1e308}, {}, "adapter_config.json: lora_alpha or alpha_pattern scales"),
    "a negative alpha": ({"lora_alpha": -1e308}, {}, "adapter_config.json: lora_alpha or alpha_pattern scales"),
    "alpha over the root of a rank": ({"lora_alpha": 1e300, "use_rslora": True}, {}, "adapter_config.json: lora_alpha or"),
    "alpha of one layer": ({"alpha_pattern": {"v_proj": 1e308}}, {}, "adapter_config.json: lora_alpha or alpha_pattern scales"),
    "a product": ({}, {"A": 1e25, "B": 1e25}, "adapter_model.safetensors: the factors of"),
    "alpha and a product": ({"lora_alpha": 1e20}, {"A": 1e10, "B": 1e10}, "adapter_model.safetensors: the factors of"),
    "a factor in float64": ({}, {"A": 1e300, "B": 0.0, "dtype": torch.float64}, "adapter_model.safetensors: the factors of"),
}


@pytest.mark.parametrize(("change", "factors", "said"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_float32_does_not_hold_is_one_line_of_every_command(change, factors, said, tmp_path, capsys):
    ours, _ = adapter(tmp_path, change)
    scaled(ours, **factors)
    theirs, _ = adapter(tmp_path / "other", {})
    write_cores(tmp_path / "cores", {n: Subspace(torch.eye(64, 3)) for n in LAYERS})
    (tmp_path / "text").write_text('{"text": "a b c"}')
    there = {p for p in tmp_path.rglob("*")}
    places = {"ours": ours, "theirs": theirs} | {name: tmp_path / name for name in ("cores", "text", "new")}
    for words in (
        "measure {theirs} {ours} --cores {cores}",
        "measure {ours} {theirs} --cores {cores}",
        "audit {theirs} {ours} --cores {cores} --html {new}",
        "audit {ours} {theirs} --cores {cores} --json",
        "audit {theirs} {ours} --weights 2 --model {theirs}",
        "export {ours} --out {new}",
        "export {ours} --out {new} --form svd --rank 1",
        "export {ours} --out {new} --form merged --model {theirs}",
        "cores {theirs} {ours} {text} --out {new}",
        "eval {ours} --model {theirs}",
    ):
        assert main(words.format(**places).split()) == 2, words
        err = capsys.readouterr().err
        assert f"{ours}/{said}" in err, words
        assert "float32" in err
        assert len(err.splitlines()) == 1
        assert {p for p in tmp_path.rglob("*")} == there, words


def test_full_weights_beyond_float32_are_one_line(tmp_path, capsys):
    for name, size in (("before", 1.0), ("after", 1e200)):
        (tmp_path / name).mkdir()
        save_file({"layer.weight": size * torch.eye(8, dtype=torch.float64)}, tmp_path / name / "model.safetensors")
    assert main(["audit", str(tmp_path / "before"), str(tmp_path / "after"), "--weights", "2"]) == 2
    said = capsys.readouterr().err
    assert "layer.weight holds values beyond float32" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("change", WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_what_does_not_change_the_function_is_not_read(change, tmp_path):
    folder, factors = adapter(tmp_path, change)
    assert_on(attach(models.qwen3(), folder), factors)


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": sorted(LAYERS), "layers_to_transform": [7]},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layers"]},
        {"target_modules": "all-linear"},
        {"r": 9, "rank_pattern": {"q_proj": 2, "v_proj": 2}},
    ],
    ids=str,
)
def test_other_words_for_the_same_layers_and_ranks_are_taken(change, tmp_path):
    folder, factors = adapter(tmp_path, change)
    assert_on(attach(models.qwen3(), folder), factors)


def test_layers_that_no_block_of_this_kind_fits_are_refused(tmp_path):
    A, B = torch.ones(1, 64), torch.ones(64, 1)
    write_adapter(tmp_path / "a", {"model.embed_tokens": Factors(A, B, 1.0)}, base="m")
    with pytest.raises(ValueError, match=r"would make something else of model\.embed_tokens than the file holds"):
        attach(models.qwen3(), tmp_path / "a")


def assert_on(adapted, factors):
    layers = lora_layers(adapted)
    assert set(layers) == set(factors)
    for name, f in factors.items():
        assert torch.equal(layers[name].lora_A["default"].weight, f.A)
        assert torch.equal(layers[name].lora_B["default"].weight, f.B)
        assert layers[name].scaling["default"] == f.scale
    assert not any(p.requires_grad for p in adapted.parameters())
    assert not adapted.training
