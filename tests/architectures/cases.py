"""Tiny models with random weights of every architecture in docs/supported.md, each a folder with the embedded tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from anchorlora.embedded import folder

MINI = folder("embedded:mini", "base_model")
OF_MINI = json.loads((MINI / "config.json").read_text())
IDS = {name: OF_MINI[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**PLAIN, "intermediate_size": 48, "num_key_value_heads": 2}
OF_8 = {**LLAMA, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {"intermediate_size_mlp": 48, "moe_layers": [1], "attn_temperature_tuning": False, "attention_chunk_size": 512}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
OF_DEEPSEEK = {"num_key_value_heads": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
CODER = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
DECODER = {name.replace("encoder", "decoder"): size for name, size in CODER.items()}
QV = ("q_proj", "v_proj")
REFUSED = "encoder-decoder models are not supported"


@dataclass(frozen=True)
class Architecture:
    """One line of the table: what transformers calls it, how its tiny model is made, and its layers of attention.

    refused: what every command says instead.
    """

    name: str
    model_type: str
    attention: tuple[str, ...]
    settings: dict = field(default_factory=dict)
    refused: str | None = None

    def __str__(self):
        return self.model_type

    def config(self):
        return AutoConfig.for_model(self.model_type, **IDS, **self.settings)

    def model(self):
        torch.manual_seed(7)
        kind = AutoModelForSeq2SeqLM if self.refused else AutoModelForCausalLM
        return kind.from_config(self.config()).float()

    def write(self, root):
        """A folder that `run` takes as a base model."""
        self.model().save_pretrained(root)
        for path in MINI.glob("tokenizer*"):
            shutil.copy(path, root)
        return root


ARCHITECTURES = [
    Architecture("Llama 2 and 3, SmolLM2, Yi", "llama", QV, LLAMA),
    Architecture("Mistral, Ministral", "mistral", QV, OF_8),
    Architecture("Gemma 2", "gemma2", QV, OF_8),
    Architecture("Gemma 3 (text)", "gemma3_text", QV, OF_8),
    Architecture("Phi-3, Phi-4", "phi3", ("qkv_proj", "o_proj"), LLAMA),
    Architecture("Phi-2", "phi", QV, LLAMA),
    Architecture("Qwen2, Qwen2.5", "qwen2", QV, LLAMA),
    Architecture("Qwen3", "qwen3", QV, OF_8),
    Architecture("OLMo 2", "olmo2", QV, LLAMA),
    Architecture("Granite 3", "granite", QV, LLAMA),
    Architecture("SmolLM3", "smollm3", QV, LLAMA),
    Architecture("Command R7B (Cohere 2)", "cohere2", QV, LLAMA),
    Architecture("GLM-4", "glm4", QV, OF_8),
    Architecture("StarCoder 2", "starcoder2", QV, LLAMA),
    Architecture("StableLM", "stablelm", QV, LLAMA),
    Architecture("OPT", "opt", QV, {**PLAIN, "word_embed_proj_dim": 32, "ffn_dim": 48}),
    Architecture("GPT-2 (Conv1D)", "gpt2", ("c_attn",), GPT2),
    Architecture("GPT-BigCode, StarCoder", "gpt_bigcode", ("c_attn",), GPT2),
    Architecture("GPT-J", "gptj", QV, {**GPT2, "rotary_dim": 4}),
    Architecture("GPT-NeoX, Pythia", "gpt_neox", ("query_key_value",), {**PLAIN, "intermediate_size": 48}),
    Architecture("Falcon", "falcon", ("query_key_value",), {**PLAIN, "ffn_hidden_size": 48}),
    Architecture("BLOOM", "bloom", ("query_key_value",), {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Architecture("Mixtral", "mixtral", QV, {**LLAMA, "num_local_experts": 4}),
    Architecture("Qwen3-MoE", "qwen3_moe", QV, {**OF_8, **EXPERTS}),
    Architecture("OLMoE", "olmoe", QV, {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    Architecture("gpt-oss", "gpt_oss", QV, {**OF_8, **ROUTED}),
    Architecture("Llama 4 (text)", "llama4_text", QV, {**OF_8, **LLAMA4, "num_local_experts": 4}),
    Architecture("DeepSeek-V3, Kimi K2", "deepseek_v3", ("q_b_proj", "kv_b_proj"), {**LLAMA, **GROUPS, **LATENT, **OF_DEEPSEEK}),
    Architecture("T5, Flan-T5", "t5", ("q", "v"), {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}, REFUSED),
    Architecture("BART", "bart", QV, {"d_model": 32, **CODER, **DECODER}, REFUSED),
]


LFM2 = Architecture("LFM2", "lfm2", QV, {**LLAMA, "layer_types": ["conv", "full_attention"]})
RWKV = Architecture(
    "RWKV", "rwkv", ("key", "value"), {**PLAIN, "num_hidden_layers": 3, "attention_hidden_size": 32, "context_length": 512}
)
GRIFFIN = Architecture("RecurrentGemma", "recurrent_gemma", QV, {**LLAMA, "num_hidden_layers": 3, "lru_width": 32})
SHARING = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
PER_LAYER = {"global_head_dim": 8, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": IDS["vocab_size"]}
GEMMA4 = Architecture("Gemma 4", "gemma4_text", QV, {**OF_8, **SHARING, **PER_LAYER})
VISION = {**PLAIN, "num_hidden_layers": 1, "intermediate_size": 48, "image_size": 28, "patch_size": 14}
IN_PARTS = {"text_config": {**IDS, **OF_8}, "vision_config": VISION, "mm_tokens_per_image": 4}
SEES = Architecture("Gemma 3", "gemma3", QV, IN_PARTS)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    of: Architecture
    layers: str  # "attention" or "all-linear"

    def __str__(self):
        return f"{self.of.model_type}-{self.layers}"

    @property
    def targets(self):
        return self.of.attention if self.layers == "attention" else self.layers


CASES = [Case(each, layers) for each in ARCHITECTURES for layers in ("attention", "all-linear")]
