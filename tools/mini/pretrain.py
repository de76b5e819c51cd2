"""Trains the tokenizer and pre-trains the embedded base model: `python pretrain.py OUT`, about an hour on 2 cores."""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import exercises
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, PAD = "<|end|>", "<|pad|>"
VOCABULARY = 4096
IN_PROMPT, IN_PASSAGE, IN_ANSWER = 0.3, 1.0, 4.0  # weights of a token's loss: few tokens are answers, and they teach most


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE; every word of the lexicon becomes one token, with and without a space before it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    words = (form for word in exercises.WORDS for form in (f"Answer:{word}", f" {word}") for _ in range(200))
    texts = chain((prompt + answer for prompt, answer in islice(exercises.pieces("tokenizer"), 60_000)), words)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, PAD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=PAD, padding_side="left")


def batches(tokenizer: PreTrainedTokenizerFast, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids (size, length), padded on the right, and the weight of each token's loss."""
    source = exercises.pieces("corpus")
    while True:
        rows = []
        for prompt, answer in islice(source, size * 16):
            ids = tokenizer(prompt).input_ids
            rows.append((ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]))
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))  # neighbours in length: little padding
        chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
        for i in torch.randperm(len(chunks)).tolist():
            length = max(len(p) + len(a) for p, a in chunks[i])
            ids = torch.full((size, length), tokenizer.pad_token_id)
            weights = torch.zeros(size, length)
            for j, (prompt_ids, answer_ids) in enumerate(chunks[i]):
                start, end = len(prompt_ids), len(prompt_ids) + len(answer_ids)
                ids[j, :end] = torch.tensor(prompt_ids + answer_ids)
                weights[j, :start] = IN_PROMPT
                weights[j, start:end] = IN_ANSWER if start else IN_PASSAGE
            yield ids, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 100) * max(0.02, 1 - s / args.steps))
    began, tokens, means = time.time(), 0, {"answer": 6.0, "text": 6.0}
    for step, (ids, weights) in enumerate(islice(batches(tokenizer, args.batch), args.steps), 1):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        weights = weights[:, 1:]
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += int((weights > 0).sum())
        for name, chosen in (("answer", weights == IN_ANSWER), ("text", (weights > 0) & (weights < IN_ANSWER))):
            if bool(chosen.any()):
                means[name] = 0.98 * means[name] + 0.02 * float(losses[chosen].mean().detach())
        if step % 100 == 0:
            shown = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
            print(f"step {step}, {time.time() - began:.0f} s, {tokens / 1e6:.2f} M tokens: {shown}", flush=True)
        if step % 1000 == 0 or step == args.steps:
            copy.deepcopy(model).to(torch.bfloat16).save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
    print(json.dumps({"steps": args.steps, "tokens": tokens, "seconds": round(time.time() - began), "loss": means}))


main()
