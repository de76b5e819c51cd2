"""Pre-trains a small base model on the texts of CL_Benchmark, for studies on a CPU: python tools/pretrain_text.py CL_BENCHMARK OUT

Never reads a label of dbpedia, amazon, yahoo or agnews: their training texts are seen as plain text, and as questions which of
several titles fits. The other tasks are seen with their labels, in the official prompts. Saves every 500 steps; called again, goes
on. The weights belong to no package: the licenses of the texts are not all clear.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from anchorlora.data import Benchmark

END, PAD = "<|end|>", "<|pad|>"
VOCABULARY, LENGTH = 4096, 256
TESTED = ("dbpedia", "amazon", "yahoo", "agnews")  # learned and tested later: no labels of theirs
LONGEST = 900  # characters of a text


def pieces(source: Path, seed: int) -> Iterator[str]:
    """Texts without end, each of one document."""
    draw = random.Random(seed)
    benchmark = Benchmark(source)
    plain: list[str] = []
    asked: list[str] = []
    for name in benchmark.names:
        texts = list(benchmark.examples(name, "train"))
        if name in TESTED:
            plain += [e.sentence[:LONGEST] for e in texts]
        else:
            asked += [benchmark.task(name).prompt(e.sentence[:LONGEST]) + e.label for e in texts]
    while True:
        kind = draw.random()
        if kind < 0.4:
            yield draw.choice(plain)
        elif kind < 0.7:
            yield draw.choice(asked)
        else:
            yield which(draw, plain)


def which(draw: random.Random, plain: list[str]) -> str:
    """A question which of some beginnings belongs to a text, in the form of the official prompts."""
    chosen = [text for text in draw.sample(plain, draw.randint(2, 6)) if len(text.split()) > 12]
    if not chosen:
        return draw.choice(plain)
    right = draw.choice(chosen)
    titles = {text: " ".join(text.split()[: draw.randint(1, 3)]) for text in chosen}
    rest = " ".join(right.split()[3:])
    options = ", ".join(draw.sample([*titles.values()], len(titles)))
    asked = "Which title fits the following paragraph? Choose one from the option."
    return f"Task:TC\nDataset:titles\n{asked}\nOption: {options} \n{rest}\nAnswer:{titles[right]}"


def tokenizer_of(source: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, PAD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(islice(pieces(source, 1), 30_000), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=PAD, padding_side="left")


def model_of(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=256, intermediate_size=640, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def batches(source: Path, tokenizer: PreTrainedTokenizerFast, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Token ids (size, LENGTH): documents one after the other, each with its end."""
    left: list[int] = []
    for text in pieces(source, seed):
        left += [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        if len(left) >= size * LENGTH:
            yield torch.tensor(left[: size * LENGTH]).view(size, LENGTH)
            left = left[size * LENGTH :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a folder in the layout of CL_Benchmark, all fifteen tasks")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    saved = args.out / "state.pt"
    if saved.is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    else:
        tokenizer = tokenizer_of(args.source)
        tokenizer.save_pretrained(args.out)
    model = model_of(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 100) * max(0.02, 1 - s / args.steps))
    done = 0
    if saved.is_file():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        done = state["step"]
    began, shown = time.time(), 0.0
    for step, ids in enumerate(islice(batches(args.source, tokenizer, args.batch, 2 + done), args.steps - done), done + 1):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        shown = 0.98 * shown + 0.02 * float(loss.detach()) if shown else float(loss.detach())
        if step % 50 == 0:
            print(json.dumps({"step": step, "seconds": round(time.time() - began), "loss": round(shown, 3)}), flush=True)
        if step % 500 == 0 or step == args.steps:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "step": step,
            }
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    model.to(torch.bfloat16).save_pretrained(args.out)


main()
