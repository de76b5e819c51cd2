"""What every example in a docstring finds: a small adapted model, protected directions for it, and an empty folder."""

import pytest
import torch


def tiny(seed=0):
    """A two-layer Qwen3 with rank-4 LoRA on q_proj and v_proj, in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_hidden_layers=2, **sizes))
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))


def cores_of(model, k=3):
    """Random protected directions for every adapted layer of a model, by its path."""
    from anchorlora.adapters import lora_layers
    from anchorlora.geometry import Subspace

    layers = lora_layers(model)
    return {name: Subspace(torch.linalg.qr(torch.randn(layer.in_features, k)).Q) for name, layer in layers.items()}


@pytest.fixture(autouse=True)
def examples(request, tmp_path_factory):
    """Names of `doctest_namespace`, for examples alone."""
    if isinstance(request.node, pytest.DoctestItem):
        names = request.getfixturevalue("doctest_namespace")
        names.update(torch=torch, tiny=tiny, cores_of=cores_of, tmp=tmp_path_factory.mktemp("example"))
