"""Adapters of strangers are read as data: what is no plain LoRA adapter is refused by name."""

import json
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from anchorlora.adapters import read_adapter, write_adapter
from anchorlora.geometry import Factors


@pytest.fixture
def adapter(tmp_path):
    layers = {f"model.layers.{i}.self_attn.q_proj": Factors(torch.randn(4, 8), torch.randn(6, 4), 2.0) for i in range(2)}
    write_adapter(tmp_path / "adapter", layers, base="x")
    return tmp_path / "adapter"


def edit_config(adapter, **fields):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(adapter, change):
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def test_scale_follows_rank_and_alpha_and_the_kind_of_scaling(adapter):
    assert {f.scale for f in read_adapter(adapter).values()} == {2.0}
    edit_config(adapter, use_rslora=True)
    assert {f.scale for f in read_adapter(adapter).values()} == {8 / 2}


def test_a_layer_may_have_its_own_alpha(adapter):
    edit_config(adapter, alpha_pattern={"layers.1.self_attn.q_proj": 4})
    scales = {layer: f.scale for layer, f in read_adapter(adapter).items()}
    assert scales == {"model.layers.0.self_attn.q_proj": 2.0, "model.layers.1.self_attn.q_proj": 1.0}


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*", r"(a)\1", "(?=a)a", "a?" * 40 + "a" * 40, "(q|r)" * 30, ".*" * 4, "("])
def test_a_strangers_expression_that_could_take_forever_is_not_run(pattern, adapter):
    edit_config(adapter, alpha_pattern={pattern: 4})
    began = time.process_time()
    with pytest.raises(ValueError, match="alpha_pattern: .*(could take forever|is not a regular expression)"):
        read_adapter(adapter)
    assert time.process_time() - began < 1


def test_hostile_targets_are_data(adapter):
    edit_config(adapter, target_modules="(a+)+$", auto_mapping={"parent_library": "os"}, base_model_name_or_path="/etc")
    assert len(read_adapter(adapter)) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "does not describe a LoRA adapter, but one of kind 'LOHA'; where PEFT can, merge it"),
        ({"peft_type": None}, "does not describe a LoRA adapter$"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', not a number"),
    ],
)
def test_other_kinds_of_adapters_are_refused(adapter, fields, message):
    edit_config(adapter, **fields)
    with pytest.raises(ValueError, match=message):
        read_adapter(adapter)


def test_missing_files_are_named(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is missing"):
        read_adapter(adapter)
    (adapter / "adapter_config.json").unlink()
    (adapter / "rows.jsonl").write_text("{}")
    for place in (adapter, adapter / "rows.jsonl"):
        with pytest.raises(ValueError, match=r"adapter_config.json is missing; give the folder of a saved PEFT adapter$"):
            read_adapter(place)


def test_an_adapter_within_the_folder_that_is_given_is_named(adapter):
    with pytest.raises(ValueError, match=f"is missing; give the folder of a saved PEFT adapter, such as {adapter}$"):
        read_adapter(adapter.parent)


def test_damaged_files_are_named(adapter):
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        read_adapter(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        read_adapter(adapter)


def test_foreign_tensors_half_pairs_and_nan_are_refused(adapter, tmp_path):
    original = (adapter / "adapter_model.safetensors").read_bytes()
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    spare, table = (f"base_model.model.model.embed_tokens.{name}" for name in ("base_layer.weight", "lora_embedding_A"))
    cases = [
        (lambda t: {**t, "base_model.model.lm_head.weight": torch.zeros(2)}, "not a factor of a plain LoRA.*; merge it"),
        (lambda t: {**t, spare: torch.zeros(2)}, "not a factor of a plain LoRA.*; save the adapter with save_embedding"),
        (lambda t: {**t, spare: torch.zeros(2), table: torch.zeros(2, 2)}, "not a factor of a plain LoRA.*; merge it"),
        (lambda t: {k: v for k, v in t.items() if k != first}, "holds only one factor of model.layers.0"),
        (lambda t: {**t, first: torch.full((4, 8), float("nan"))}, "NaN or infinite"),
        (lambda t: {**t, first: torch.zeros(3, 8)}, "factors do not fit"),
    ]
    for change, message in cases:
        edit_weights(adapter, change)
        with pytest.raises(ValueError, match=message):
            read_adapter(adapter)
        (adapter / "adapter_model.safetensors").write_bytes(original)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(st.sampled_from(["module.", "_orig_mod.", "base_model.model."]), max_size=4),
    after=st.lists(st.sampled_from(["module.", "_orig_mod.", "_fsdp_wrapped_module."]), max_size=2),
)
def test_keys_of_a_wrapped_model_are_the_layers_of_the_model(adapter, before, after):
    original = {layer: factors.A.clone() for layer, factors in read_adapter(adapter).items()}  # a copy: files are mapped
    kept = (adapter / "adapter_model.safetensors").read_bytes()
    wrapped = "".join((*before, "base_model.model.", *after))
    edit_weights(adapter, lambda tensors: {key.replace("base_model.model.", wrapped): tensor for key, tensor in tensors.items()})
    read = read_adapter(adapter)
    assert set(read) == set(original)
    assert all(torch.equal(read[layer].A, A) for layer, A in original.items())
    (adapter / "adapter_model.safetensors").write_bytes(kept)
