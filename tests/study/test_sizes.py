"""Sizes from configurations alone: the study's base models, and an estimate of activations beside what autograd really keeps."""

import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from anchorlora.adapters import AdapterStack
from anchorlora.cli.app import main
from anchorlora.config import RunConfig
from anchorlora.recipes import long_sequence, mini, mistral_7b, qwen3_8b
from anchorlora.runs import sizes as module
from anchorlora.runs.sizes import sizes
from study.fake_steps import traced

# the published configurations of the two base models, as far as shapes go
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}


def folder(root, config):
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    return str(root)


@pytest.mark.parametrize(
    ("recipe", "config", "parameters", "block", "layers"),
    [
        (qwen3_8b, QWEN3_8B, 8_190_735_360, 3_833_856, 72),
        (mistral_7b, MISTRAL_7B, 7_248_023_552, 3_407_872, 64),
    ],
)
def test_the_studys_backbones_have_their_known_sizes(recipe, config, parameters, block, layers, tmp_path):
    found = sizes(recipe().changed({"model": folder(tmp_path / "m", config)}), tasks=4, cumulative=True)
    assert (found.parameters, found.block, found.layers, found.dtype) == (parameters, block, layers, "bfloat16")
    assert found.memory["base_model"] == 2 * parameters
    assert found.memory["blocks"] == 4 * block * (4 + 3)  # value, gradient, two moments; three frozen blocks
    assert found.memory["base_model"] < found.peak < 80 * 2**30
    width = config["num_hidden_layers"] * config["hidden_size"]
    assert found.host == 4 * 4 * (128 + 32) * width
    many, more = (sizes(recipe().changed({"model": str(tmp_path / "m")}), tasks=n, cumulative=False).host for n in (256, 1000))
    assert many == more == 4 * (2048 + 2 * 4096) * width


def test_a_shared_adapter_stores_no_earlier_blocks(tmp_path):
    recipe = qwen3_8b().changed({"model": folder(tmp_path / "m", QWEN3_8B)})
    found = sizes(recipe, tasks=4, cumulative=False)
    assert found.memory["blocks"] == 4 * found.block * 4


@pytest.mark.parametrize("hidden", [128, 320])
def test_activations_are_estimated_within_a_factor_of_what_autograd_keeps(hidden, tmp_path):
    config = {**QWEN3_8B, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 3, "vocab_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    settings = {"model": folder(tmp_path / "m", config), "dtype": "float32", "micro_batch": 2, "max_tokens": 96}
    estimate = sizes(qwen3_8b().changed(settings), tasks=1, cumulative=False).memory["activations"]
    blocks = AdapterStack(Qwen3ForCausalLM(Qwen3Config(**config)), targets=("q_proj", "v_proj"), rank=8, alpha=32, dropout=0.1)
    blocks.open(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in blocks.trainable():
            p.add_(0.1)
    weights, kept = {p.untyped_storage().data_ptr() for p in blocks.model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    blocks.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.randint(0, 64, (2, 96))
        outputs = blocks.model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=4, use_cache=False)
    assert outputs.logits.requires_grad
    assert 1 / 2 < estimate / sum(kept.values()) < 2


TWO = {"num_hidden_layers": 2}
SMALL = {"hidden_size": 320, "intermediate_size": 960, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80} | TWO
TRACED = {
    "qwen3, one example": (QWEN3_8B | TWO, {"micro_batch": 1, "max_tokens": 512, "eval_batch": 16}),
    "qwen3, eight examples": (QWEN3_8B | TWO, {"micro_batch": 8, "max_tokens": 256, "eval_batch": 64}),
    "qwen3, one long example": (QWEN3_8B | TWO, {"micro_batch": 1, "max_tokens": 2048, "eval_batch": 4}),
    "qwen3, float32": (QWEN3_8B | TWO, {"micro_batch": 4, "max_tokens": 512, "eval_batch": 16, "dtype": "float32"}),
    "qwen3, every linear layer": (
        QWEN3_8B | TWO,
        {"micro_batch": 4, "max_tokens": 512, "targets": "all-linear", "eval_batch": 16},
    ),
    "mistral": (MISTRAL_7B | TWO, {"micro_batch": 4, "max_tokens": 512, "eval_batch": 64}),
    "a small one": (QWEN3_8B | SMALL | {"vocab_size": 512}, {"micro_batch": 4, "max_tokens": 512, "eval_batch": 32}),
    "no dropout": (QWEN3_8B | TWO, {"micro_batch": 4, "max_tokens": 512, "dropout": 0, "eval_batch": 16}),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", TRACED)
def test_memory_is_estimated_within_a_fifth_of_a_traced_step_of_the_real_model(name, tmp_path):
    """Parameters are known exactly, so only what comes beside them is compared."""
    config, settings = TRACED[name]
    recipe = qwen3_8b().changed({"model": folder(tmp_path / "m", config), "device": "cpu"} | settings)
    found = sizes(recipe, tasks=1, cumulative=False).memory
    training, evaluating = traced(recipe)
    beside = found["base_model"] + found["blocks"]
    assert 0.8 < found["activations"] / (training - beside) < 1.25
    assert 0.8 < found["evaluation"] / (evaluating - beside) < 1.25


def test_activations_are_computed_again_only_on_an_accelerator_whose_memory_may_not_hold_them(tmp_path, monkeypatch):
    recipe, left = qwen3_8b().changed({"model": folder(tmp_path / "m", QWEN3_8B)}), {}
    monkeypatch.setattr(module, "free_memory", lambda device: left["bytes"])
    estimate = sizes(recipe, tasks=1, cumulative=False)
    needed = estimate.peak - estimate.memory["base_model"]

    def again(device, free):
        left["bytes"] = free
        return module.needs_checkpointing(recipe, torch.device(device))

    assert [again("cuda", free) for free in (None, needed, 2 * needed - 2, 2 * needed + 2)] == [True, True, True, False]
    assert not any(again("cpu", free) for free in (None, 1))
    (tmp_path / "m/config.json").unlink()
    assert again("cuda", 2 * needed + 2), "there is no estimate"


def test_a_dry_run_says_steps_parameters_and_memory_and_loads_no_weights(capsys, tmp_path, monkeypatch):
    import anchorlora.models.load

    monkeypatch.setattr(anchorlora.models.load, "load_base_model", lambda *a, **k: pytest.fail("weights were loaded"))
    assert main(["run", "mini", "--method", "o-lora-hard", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "# 320 optimizer steps in all" in said
    assert "# 2,410,560 parameters of the base model (float32); 21,504 in a block at 8 layers" in said
    assert main(["run", "qwen3-8b", "--model", folder(tmp_path / "m", QWEN3_8B), "--method", "sfor", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "# no data folder yet" in said
    assert "8,190,735,360 parameters of the base model (bfloat16)" in said


def test_a_model_without_a_configuration_leaves_sizes_unknown_and_says_so(capsys, tmp_path):
    assert main(["run", "qwen3-8b", "--model", str(tmp_path / "nothing"), "--method", "sfor", "--dry-run"]) == 0
    assert "# sizes unknown: no configuration of" in capsys.readouterr().out


def test_the_studys_recipes_differ_from_the_standard_one_in_backbone_and_precision_alone():
    from anchorlora.config import differences
    from anchorlora.recipes import standard_cl

    def changes(recipe):
        configs = [RunConfig(method="sfor", order=("a",), seed=1, recipe=r) for r in (standard_cl(), recipe)]
        return {line.split(":")[0] for line in differences(*configs)}

    assert changes(qwen3_8b()) == changes(mistral_7b()) == {"recipe.name", "recipe.base_model.model", "recipe.base_model.dtype"}
    assert changes(long_sequence()) == {"recipe.name", "recipe.tasks.orders"}
    assert len(long_sequence().tasks.orders["order1"]) == 15
    assert mini().trace.trace_points is None
