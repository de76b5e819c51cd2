"""What every loop is tried with: a two-layer Qwen3 with LoRA, a learned anchor or a fresh block, cores, and a second task.

The recipe is the hardest that a loop meets in practice: 200 AdamW steps with weight decay 0.1, gradient clipping and a schedule;
for other optimizers in the same loop 60.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from anchorlora import Anchor, FeatureStore, Freeze, ProjectDisplacement, ProjectGradient, Retract, measure
from anchorlora.adapters import AdapterStack
from anchorlora.adapters.stack import CURRENT, HISTORY

STEPS, FEWER = 200, 60
EXAMPLES, LENGTH = 16, 12  # of the batch that is learned
CLIP = 1.0


@dataclass
class Setting:
    """A model in which a second task begins, its cores, and what protects them."""

    model: torch.nn.Module
    cores: dict
    constraints: list
    adapter_name: str
    history: str | None = None

    def anchor(self, model=None):
        return Anchor.of(
            model if model is not None else self.model, cores=self.cores, adapter_name=self.adapter_name, history=self.history
        )

    def options(self):
        """Keywords of the callbacks."""
        return {"cores": self.cores, "adapter_name": self.adapter_name, "history": self.history}


def base_model(dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def tokens(task, examples=EXAMPLES, length=LENGTH):
    """Token ids (examples, length) of one task, which has tokens of its own."""
    draw = torch.Generator().manual_seed(100 + task)
    return torch.randint(16, (examples, length), generator=draw) + 16 * (task - 1)


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def learned(*, dtype=torch.float32, rank=4):
    """SFOR's setting: one shared adapter that has learned a first task."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(
            r=rank, lora_alpha=4 * rank, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        model = get_peft_model(base_model(dtype), config).to(dtype)
    cores = first_task(model)
    return Setting(model, cores, [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")], "default")


def fresh(*, dtype=torch.float32, rank=4):
    """Hard protection's setting: a fresh zero-output block beside a frozen history."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = AdapterStack(base_model(), targets=("q_proj", "v_proj"), rank=rank, alpha=4 * rank)
    blocks.open(torch.Generator().manual_seed(1))
    cores = first_task(blocks.model)
    blocks.fold()
    blocks.open(torch.Generator().manual_seed(2))
    blocks.model.to(dtype)  # the blocks themselves are float32 only; a test may look closer
    return Setting(blocks.model, cores, [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")], CURRENT, HISTORY)


SETTINGS = {"sfor": learned, "hard": fresh}


def first_task(model):
    rows = FeatureStore(limit=64)
    optimizer = torch.optim.AdamW(trained(model), lr=3e-3)
    model.train()
    with rows.collect(model):
        for _ in range(10):
            loss_of(model, tokens(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return rows.cores(at_most=6)


def steps_of(row):
    return STEPS if row.optimizer in ("AdamW", "adamw_torch") or "SFT" in row.loop else FEWER


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, **settings)


def schedule(optimizer, steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=steps)


def verdict(anchor, *, unmoved=1e-3):
    """rho and the largest that counts as zero; fails where the layer was not really trained."""
    drift = measure(anchor)
    assert drift.d_eff > unmoved, f"nothing was learned: d_eff {drift.d_eff:.1e}"
    return drift.rho, drift.bound
