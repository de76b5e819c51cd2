"""On an accelerator: a bfloat16 base with float32 factors at the paper's layer shapes, exact and without a large matrix."""

import pytest
import torch

from anchorlora import AdaptedLayer, Anchor, Freeze, ProjectDisplacement, ProjectGradient, Retract, Subspace, measure, protect
from anchorlora.geometry import Factors
from toys import parameters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = ((4096, 4096), (4096, 1024))  # q_proj and v_proj of Qwen3-8B


def anchor_on_gpu(count=36):
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, device="cuda")

    layers = []
    for number in range(count):
        for d_in, d_out in SHAPES:
            factors = Factors(torch.nn.Parameter(normal(8, d_in) / 64), torch.nn.Parameter(normal(d_out, 8) / 64), 4.0)
            core = Subspace(torch.linalg.qr(normal(d_in, 20)).Q)
            layers.append(AdaptedLayer(f"layer{number}-{d_out}", factors, factors.copy(), core=core))
    return Anchor(tuple(layers))


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"weight_decay": 0.1}, {"capturable": True}])
def test_sfor_is_exact_at_the_papers_shapes_and_takes_little_memory(settings):
    anchor = anchor_on_gpu()
    optimizer = torch.optim.AdamW(parameters(anchor), lr=1e-4, **settings)
    torch.backends.cuda.matmul.allow_tf32 = True  # projections must not use it
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with protect(optimizer, anchor, [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]):
        for step in range(50):
            torch.manual_seed(step)
            for p in parameters(anchor):
                p.grad = torch.randn_like(p) if p.requires_grad else None
            optimizer.step()
    torch.backends.cuda.matmul.allow_tf32 = False
    drift = measure(anchor)
    assert drift.exact, (drift.rho, drift.bound)
    assert drift.d_eff > 0.1
    assert torch.cuda.max_memory_allocated() - before < 600e6


def test_a_bfloat16_base_keeps_float32_factors_and_exact_protection():
    import models
    from anchorlora.adapters import AdapterStack

    blocks = AdapterStack(models.qwen3(dtype=torch.bfloat16).cuda(), targets=("q_proj", "v_proj"), rank=8, alpha=32)
    blocks.open(torch.Generator().manual_seed(0))
    assert {p.dtype for p in blocks.trainable()} == {torch.float32}
    assert {p.device.type for p in blocks.trainable()} == {"cuda"}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_keeps_float32_factors_and_exact_protection(kind, small_model):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    import models
    from anchorlora.adapters import AdapterStack, lora_layers
    from anchorlora.config import BaseModelSettings
    from anchorlora.models.load import load_base_model

    base = load_base_model(BaseModelSettings(model=str(small_model), quantized=kind, device="cuda")).model
    blocks = AdapterStack(base, targets=("q_proj", "v_proj"), rank=4, alpha=16)
    blocks.open(torch.Generator().manual_seed(0))
    core = Subspace(torch.linalg.qr(torch.randn(64, 7, device="cuda")).Q)
    anchor = blocks.anchor(cores=dict.fromkeys(lora_layers(blocks.model), core))
    optimizer = torch.optim.AdamW(blocks.trainable(), lr=1e-2)
    blocks.model.train()
    with protect(optimizer, anchor, [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]):
        for step in range(5):
            ids = models.tokens(seed=step).cuda()
            blocks.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {p.dtype for p in blocks.trainable()} == {torch.float32}
    assert measure(anchor).d_eff > 0.01
    assert measure(anchor).exact
