"""What every example in a docstring finds: a small adapted model, its cores, an empty folder, and saved checkpoints."""

import runpy
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent / "tests"


def pytest_configure(config):
    """Unpack the stored results, which tests and examples read, once for all processes."""
    if not hasattr(config, "workerinput"):
        runpy.run_path(str(TESTS.parent / "tools/results.py"))["unpack_all"]()


def pytest_ignore_collect(collection_path):
    """Helpers of tests hold no examples; some are programs of their own."""
    helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if helper and TESTS in collection_path.parents else None


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


def checkpoints_in(folder):
    """Two saved adapters and a file of cores: only B moved between them."""
    from anchorlora.features import write_cores

    model = tiny()
    model.save_pretrained(folder / "before")
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.fill_(0.1)
    model.save_pretrained(folder / "after")
    write_cores(folder / "cores.safetensors", cores_of(model))
    return folder / "before", folder / "after", folder / "cores.safetensors"


@pytest.fixture(autouse=True)
def examples(request, tmp_path_factory):
    """Names of `doctest_namespace`, for examples alone."""
    if isinstance(request.node, pytest.DoctestItem):
        names = request.getfixturevalue("doctest_namespace")
        tmp = tmp_path_factory.mktemp("example")
        names.update(torch=torch, tiny=tiny, cores_of=cores_of, tmp=tmp, checkpoints=lambda: checkpoints_in(tmp))
