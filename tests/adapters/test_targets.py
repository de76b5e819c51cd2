"""Which layers take an adapter: Conv1D as well as nn.Linear, and by "all-linear" no output layer, router or fused expert."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

import models
from anchorlora import Anchor, FeatureStore
from anchorlora.adapters import (
    AdapterStack,
    attach,
    detach,
    lora_layers,
    merge,
    read_adapter,
    realized_weights,
    target_layers,
    write_adapter,
)
from anchorlora.adapters.kinds import block_factors
from anchorlora.adapters.targets import names_of, split_by_text
from anchorlora.errors import AnchorloraError
from anchorlora.geometry import Factors
from anchorlora.recipes import mini
from anchorlora.train.stages import facts_of_run
from architectures.cases import ARCHITECTURES, LLAMA, OF_8, PLAIN, QV, ROUTED, SEES, Architecture
from architectures.trials import protection

OF = {each.model_type: each for each in ARCHITECTURES}
EPS = torch.finfo(torch.float32).eps
PARAMETER = "mlp.experts.gate_up_proj"


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=models.tokens()).logits


def base(kind=models.gpt2):
    torch.manual_seed(3)
    return kind()


def mixed():
    """A GPT-2 in which one layer is an nn.Linear of the same function."""
    model = base()
    old = model.transformer.h[0].mlp.c_fc
    new = model.transformer.h[0].mlp.c_fc = nn.Linear(old.nx, old.nf)
    new.weight.data, new.bias.data = old.weight.data.T.clone(), old.bias.data.clone()
    return model


def stacked(model, targets, folder):
    """A stack of two tasks, saved."""
    stack = AdapterStack(model, targets=targets, rank=4, alpha=16)
    for task in range(2):
        stack.open(torch.Generator().manual_seed(task))
        with torch.no_grad():
            for p in stack.trainable():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(task + p.shape[0])) / 8)
        if task == 0:
            stack.fold()
    stack.save(folder)
    return stack


@settings(max_examples=15, deadline=None)
@given(
    numbers=st.sets(st.integers(0, 1), min_size=1),
    names=st.sets(st.sampled_from(["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"]), min_size=1),
    whole=st.booleans(),
)
def test_a_regular_expression_adapts_the_layers_that_peft_adapts_by_it(numbers, names, whole, tmp_path_factory):
    pattern = rf"model\.layers\.({'|'.join(map(str, sorted(numbers)))})\..*\.({'|'.join(sorted(names))})"
    pattern = pattern if whole else rf".*{pattern[len('model') :]}"
    folder = tmp_path_factory.mktemp("a")
    stack = stacked(base(models.qwen3), pattern, folder / "stack")
    theirs = get_peft_model(base(models.qwen3), LoraConfig(r=4, target_modules=pattern))
    assert sorted(stack.factors()) == sorted(lora_layers(theirs))
    assert len(stack.factors()) == len(numbers) * len(names)
    loaded = PeftModel.from_pretrained(base(models.qwen3), folder / "stack")
    assert sorted(lora_layers(loaded)) == sorted(read_adapter(folder / "stack")) == sorted(stack.factors())


@pytest.mark.parametrize("targets", [("c_attn",), "all-linear"])
def test_an_adapter_of_gpt2_is_loaded_by_plain_peft_without_a_warning_and_computes_the_same(targets, tmp_path):
    stack = stacked(base(), targets, tmp_path / "a")
    assert all(isinstance(layer.get_base_layer(), Conv1D) for layer in lora_layers(stack.model).values())
    expected = logits(stack.model)
    assert float((expected - logits(base())).abs().max()) > 1e-2
    assert json.loads((tmp_path / "a/adapter_config.json").read_text())["fan_in_fan_out"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT's use of transformers
        found = logits(PeftModel.from_pretrained(base(), tmp_path / "a"))
    assert torch.allclose(found, expected, rtol=0, atol=50 * EPS * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_a_model_with_both_kinds_of_layers_is_adapted_and_loaded(tmp_path):
    stack = stacked(mixed(), ("c_fc",), tmp_path / "a")
    assert not stack.fan_in_fan_out, "PEFT finds out for each layer"
    kinds = [type(layer.get_base_layer()).__name__ for layer in lora_layers(stack.model).values()]
    assert kinds == ["Linear", "Conv1D"]
    expected = logits(stack.model)
    for loaded in (PeftModel.from_pretrained(mixed(), tmp_path / "a"), attach(mixed(), tmp_path / "a")):
        assert torch.allclose(logits(loaded), expected, rtol=0, atol=50 * EPS * float(expected.abs().max()))


def test_an_update_is_merged_into_transposed_weights_and_read_from_them(tmp_path):
    stack = stacked(base(), ("c_fc",), tmp_path / "a")
    expected, saved, merged = logits(stack.model), read_adapter(tmp_path / "a"), base()
    assert max(found.relative for found in merge(merged, saved, torch.float32).values()) < 1e-5
    assert torch.allclose(logits(merged), expected, rtol=0, atol=50 * EPS * float(expected.abs().max()))
    for path, weight in realized_weights(attach(base(), tmp_path / "a")).items():
        layer = merged.get_submodule(path.removeprefix("base_model.model."))
        assert weight().shape == (layer.nf, layer.nx)
        assert torch.allclose(weight().T, layer.weight, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "falcon", "opt", "llama", "gemma2", "phi"])
def test_all_linear_is_what_peft_takes_whatever_the_output_layer_is_called(kind):
    model = OF[kind].model()
    ours = set(target_layers(model, "all-linear"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = set(lora_layers(get_peft_model(model, LoraConfig(target_modules="all-linear"))))
    assert ours == theirs


@pytest.mark.parametrize(("make", "head"), [(OF["gpt2"].model, "lm_head"), (models.Experts, "head")])
def test_no_message_recommends_the_output_layer_and_all_linear_leaves_it_out(make, head):
    model = make()
    assert head not in target_layers(model, "all-linear")
    assert isinstance(model.get_submodule(head), nn.Linear)
    with pytest.raises(LookupError, match="no module called query; its linear layers are: ") as unknown:
        target_layers(model, ("query",))
    table = next(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    with pytest.raises(TypeError, match=r"is a Embedding, and only linear layers \(nn.Linear, Conv1D\) can be") as wrong:
        AdapterStack(model, targets=(table,), rank=4, alpha=8)
    assert head not in str(unknown.value) + str(wrong.value)
    assert list(target_layers(model, (head,))) == [head], "it is taken where somebody names it"


def test_experts_that_share_one_parameter_are_refused_with_its_name():
    with pytest.raises(TypeError, match=r"0\.mlp\.experts\.gate_up_proj of MixtralForCausalLM holds all experts in one parameter"):
        target_layers(OF["mixtral"].model(), ("gate_up_proj",))
    taken = {name.rsplit(".", 1)[-1] for name in target_layers(OF["mixtral"].model(), "all-linear")}
    assert taken == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_layers_that_peft_would_take_for_fused_experts_are_refused_and_no_part_of_all_linear():
    pytest.importorskip("peft.utils.transformers_weight_conversion", reason="this PEFT renames nothing")
    model = OF["deepseek_v3"].model()
    dense = "model.layers.0.mlp.gate_proj"
    assert type(model.get_submodule(dense)) is nn.Linear
    for targets in (("gate_proj",), (dense,), ("q_b_proj", "down_proj")):
        with pytest.raises(TypeError, match="would become a fused expert: in models of this type, PEFT takes the name for"):
            AdapterStack(model, targets=targets, rank=4, alpha=8)
    assert dense not in target_layers(model, "all-linear")
    assert dense in target_layers(models.llama(), "all-linear")


def test_a_router_that_is_linear_by_class_only_is_refused_and_no_part_of_all_linear():
    model = OF["llama4_text"].model()
    router = "model.layers.1.feed_forward.router"
    assert isinstance(model.get_submodule(router), nn.Linear)
    assert router not in target_layers(model, "all-linear")
    with pytest.raises(TypeError, match=f"{router} of Llama4ForCausalLM is a Llama4Router, and only linear layers"):
        target_layers(model, (router,))
    falcon = target_layers(OF["falcon"].model(), "all-linear")  # whose forward is its own, and linear
    assert {type(layer).__name__ for layer in falcon.values()} == {"FalconLinear"}


FFN = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
OF_DBRX = {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}}
ROUTERS = {  # of class nn.Linear, within what transformers calls the router or beside the experts
    "jetmoe": ({**LLAMA, **ROUTED, "kv_channels": 8}, "mlp.router.layer", "self_attention.kv_proj"),
    "dbrx": ({**OF_DBRX, "ffn_config": FFN}, "ffn.router.layer", "norm_attn_norm.attn.Wqkv"),
    "hunyuan_v1_moe": ({**OF_8, "num_experts": 4, "moe_topk": 2}, "mlp.gate.wg", "self_attn.q_proj"),
    "doge": ({**LLAMA, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}, "mlp.router_gate", "mlp.gate_proj"),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_router_of_plain_linear_layers_is_no_part_of_all_linear_and_taken_where_somebody_names_it(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    of_kind, router, other = ROUTERS[kind]
    model = Architecture("", kind, (), of_kind).model()
    path = next(name for name, module in model.named_modules() if name.endswith(router) and type(module) is nn.Linear)
    layers = target_layers(model, "all-linear")
    assert not any(name.endswith(router) for name in layers)
    assert not any("router" in name for name in layers)
    assert any(name.endswith(other) for name in layers)
    assert list(target_layers(model, (path,))) == [path]


def test_a_gate_without_experts_beside_it_is_a_layer_like_any_other():
    model = models.llama()
    mlp = model.model.layers[0].mlp
    mlp.gate = mlp.gate_proj  # as some models of their own code call the gate of a GLU
    del mlp.gate_proj
    assert "model.layers.0.mlp.gate" in target_layers(model, "all-linear")


MIXER = {"state_size": 8, "time_step_rank": 4}
OF_JAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}


@pytest.mark.parametrize(("kind", "of_kind", "passed_by"), [("mamba", MIXER, "out_proj"), ("jamba", OF_JAMBA, "dt_proj")])
def test_all_linear_leaves_out_layers_whose_weight_the_model_reads_past_an_adapter(kind, of_kind, passed_by):
    model, called = Architecture("", kind, (), {**OF_8, **of_kind}).model(), set()
    assert isinstance(next(m for n, m in model.named_modules() if n.endswith(passed_by)), nn.Linear)
    stack = AdapterStack(model, targets="all-linear", rank=2, alpha=4)
    layers = lora_layers(stack.model)
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: called.add(name))
    logits(stack.model)
    assert called == set(layers)
    assert not any(name.endswith(passed_by) for name in layers)


OF_MIXER = {"mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8}
OF_ZAMBA2 = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "adapter_rank": 24,
    "num_mem_blocks": 1,
    "num_key_value_heads": 4,
}
ZAMBA2 = Architecture("Zamba 2", "zamba2", QV, {**LLAMA, **OF_MIXER, **OF_ZAMBA2, "use_shared_attention_adapter": True})


def test_all_linear_of_a_block_that_stands_at_two_depths_is_what_text_reaches_at_each():
    layers = target_layers(ZAMBA2.model(), "all-linear")
    assert any("adapter_list.0" in name for name in layers)
    assert any("adapter_list.1" in name for name in layers)
    assert protection(ZAMBA2.model(), "all-linear") < 1e-6
    model = AdapterStack(ZAMBA2.model(), targets="all-linear", rank=2, alpha=4).model
    saved = {name: block_factors(layer, "default") for name, layer in lora_layers(model).items()}
    passed = next(n for n, m in model.unload().named_modules() if "adapter_list" in n and type(m) is nn.Linear and n not in saved)
    reading, unread = split_by_text(ZAMBA2.model(), saved | {passed: next(iter(saved.values()))}, where="it")
    assert reading.keys() == saved.keys()
    assert list(unread) == [passed]


def test_names_of_layers_that_are_numbered_name_those_alone(tmp_path):
    """As of Gemma 3n's `altup_projections.0` too: 0 alone is a layer of the decoder as well."""
    model = ZAMBA2.model()
    layers = target_layers(model, "all-linear")
    with pytest.raises(LookupError, match="no module called query; its linear layers are: ") as unknown:
        target_layers(model, ("query",))
    offered = str(unknown.value).rpartition(": ")[2].split(", ")
    assert set(target_layers(model, tuple(offered))) == set(layers)
    request = SimpleNamespace(old_factors=layers, asked=mini().changed({"model": str(ZAMBA2.write(tmp_path / "model"))}))
    teaching = SimpleNamespace(request=request, session=SimpleNamespace(loaded=SimpleNamespace(device=torch.device("cpu"))))
    assert facts_of_run(teaching)["targets"] == offered
    assert names_of(["0", "model.layers.0.mlp.down_proj", "h.1.mlp.down_proj"]) == ["0", "down_proj"]


def test_what_peft_does_not_adapt_is_refused_in_one_line():
    with pytest.raises(ValueError, match="PEFT puts no adapter on MambaForCausalLM: .*'out_proj' is incompatible") as refused:
        AdapterStack(Architecture("", "mamba", (), {**PLAIN, **MIXER}).model(), targets=("out_proj",), rank=2, alpha=4)
    assert isinstance(refused.value, AnchorloraError)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_of_a_model_that_sees_images_the_part_that_reads_text_is_adapted(targets):
    model = SEES.model()
    assert any("vision" in name and name.endswith("q_proj") for name, _ in model.named_modules())
    layers = lora_layers(AdapterStack(model, targets=targets, rank=2, alpha=4).model)
    assert {name.rpartition(".layers.")[0] for name in layers} == {"model.language_model"}
    assert protection(SEES.model(), targets) < 1e-6


def test_a_path_or_an_expression_names_a_layer_of_any_part():
    model = SEES.model()
    path = next(name for name, _ in model.named_modules() if "vision" in name and name.endswith("q_proj"))
    assert list(target_layers(model, (path,))) == [path]
    assert list(target_layers(model, r".*vision.*\.q_proj")) == [path]
    assert len(target_layers(model, ("v_proj", path))) == 3


def test_factors_the_wrong_way_round_do_not_fit(tmp_path):
    stack = stacked(base(), ("c_fc",), tmp_path / "a")
    saved = read_adapter(tmp_path / "a")
    swapped = {name: Factors(f.B.T, f.A.T, f.scale) for name, f in saved.items()}
    write_adapter(tmp_path / "b", swapped, base=None)
    with pytest.raises(ValueError, match=r"as \(64, 256\), but it is \(256, 64\)"):
        AdapterStack.continuing(base(), tmp_path / "b", rank=2)
    assert AdapterStack.continuing(base(), tmp_path / "a", rank=2)._names == stack._names


def test_fused_experts_that_peft_adapts_are_refused_with_their_name_by_store_and_anchor_and_as_files(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(OF["mixtral"].model(), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=[PARAMETER]))
    said = r"layers\.0\.mlp\.experts \(its parameter gate_up_proj\) is adapted through PEFT's ParamWrapper, .* target_parameters"
    with pytest.raises(TypeError, match=said), FeatureStore().collect(model):
        pass
    with pytest.raises(TypeError, match=said):
        Anchor.of(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="adapter_config.json sets target_parameters, so the update is not a product s B A"):
        read_adapter(tmp_path)


class Packed(nn.Linear):
    """As bitsandbytes keeps 4 bits in the model's own type (for FSDP2): one column, and a forward that cannot run here."""

    def __init__(self, of):
        super().__init__(of.in_features, of.out_features, bias=False)
        self.weight = nn.Parameter(torch.zeros(of.weight.numel() // 4, 1, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x):
        raise RuntimeError("no kernel")


def test_a_packed_weight_in_the_models_own_type_is_a_linear_layer():
    model = models.qwen3()
    layer = model.model.layers[0].self_attn
    layer.q_proj = Packed(layer.q_proj)
    assert "model.layers.0.self_attn.q_proj" in target_layers(model, ("q_proj",))


@pytest.mark.parametrize("kind", [models.gpt2, models.qwen3])
def test_a_model_is_bitwise_what_it_was_after_adapters_of_any_making_were_taken_off(kind, tmp_path):
    model = base(kind)
    before, weights, names = logits(model), {n: w.clone() for n, w in model.state_dict().items()}, set(dict(model.named_modules()))
    for folder in (tmp_path / "1", tmp_path / "2"):
        trained = stacked(model, "all-linear", folder)
        assert not torch.equal(logits(trained.model), before)
        detach(model)
        assert not torch.equal(logits(attach(model, folder)), before)
        detach(model)
        assert torch.equal(logits(model), before)
        assert set(dict(model.named_modules())) == names
        assert all(torch.equal(weights[n], w) for n, w in model.state_dict().items())
