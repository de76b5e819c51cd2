"""Real model classes with random weights, and a tokenizer trained on the spot."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def qwen3(vocab=64, dtype=torch.float32, **changes):
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, head_dim=16, **{**SMALL, **changes})).to(dtype)


def llama(vocab=64):
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **SMALL))


def mistral(vocab=64):
    return MistralForCausalLM(MistralConfig(vocab_size=vocab, head_dim=16, sliding_window=None, **SMALL))


def gpt2(vocab=64):
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_embd=64, n_layer=2, n_head=4, n_positions=128))


def tokenizer(texts, size=400, *, bos=False):
    """A byte-level BPE tokenizer; with `bos` it begins every text with a special token, as Llama's does."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<end>", "<pad>", "<begin>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    if bos:
        from tokenizers.processors import TemplateProcessing

        inner.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>", padding_side="left")


def tokens(n=8, length=12, vocab=64, seed=0):
    return torch.randint(0, vocab, (n, length), generator=torch.Generator().manual_seed(seed))


class Experts(nn.Module):
    """A mixture of experts that are linear layers of their own: token t goes to expert t % count, in an order of its own."""

    def __init__(self, count=4, vocab=64, d=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.q_proj, self.shared = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(d, 2 * d), "down": nn.Linear(2 * d, d)}) for _ in range(count))

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None, **_):
        x = self.embed(input_ids)
        x = x + self.q_proj(x)
        flat, ids = x.flatten(0, 1), input_ids.flatten()
        out = self.shared(flat)
        for number, expert in enumerate(self.experts):
            mine = (ids % len(self.experts) == number).nonzero().flatten().flip(0)
            if len(mine):
                out = out.index_add(0, mine, expert["down"](torch.relu(expert["up"](flat[mine]))))
        return self.head(out.view_as(x))
