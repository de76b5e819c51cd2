"""The protocol of PEFT's method comparison in small: eight configurations on SmolLM2-135M-Instruct, on a CPU.

As there: the loss is on every token of "Question: .. Answer: ..", steps of 4 rows, a cosine schedule, clipping at 1, weight decay
0.1; then the share of greedy answers that are right, and how much the loss on plain text has risen. Other than there: beginnings of
encyclopedia entries and their class in place of mathematics; 60 steps instead of 5,000, and so ten times the learning rates;
float32; news in place of Wikipedia, where each token is predicted from those before it; memory is the process's largest.

Run: ANCHORLORA_SHARED=FOLDER ANCHORLORA_CHAT_MODEL=FOLDER python -m benchmarks.peft_comparison.run OUT; called again, only what is
missing. OUT/*.json are the results.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, OSFConfig, get_peft_model
from peft.optimizers import create_lorafa_optimizer, create_riemannian_optimizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup, set_seed
from transformers.utils import logging

from anchorlora import measure
from anchorlora.constraints import create_protected_optimizer
from anchorlora.data import Benchmark
from anchorlora.features import read_cores
from anchorlora.models.cores_from_text import CoreRule, cores_from_data

SEED, STEPS, BATCH, CLIP, DECAY = 0, 60, 4, 1.0, 0.1
WORDS, TESTS = 14, 100  # words of an entry; entries that are tested
TEXTS, TEXT_TOKENS = 40, 96  # plain texts, and tokens of each at most
OWN_TEXTS = 60  # that the model writes, for the cores
LORA, OSF, FULL = 1e-3, 5e-4, 1e-4  # learning rates: ten times those of the comparison
CORES, BASE = "cores", "base"
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Make = Callable[[Any, Path], tuple[nn.Module, torch.optim.Optimizer]]


def lora(**changes: Any) -> LoraConfig:
    """The comparison's LoRA configuration; q_proj and v_proj are what PEFT adapts in a Llama."""
    settings = {"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**settings | changes)


def adamw(model: nn.Module, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=DECAY)


def with_lorafa(base: Any, out: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = get_peft_model(base, lora())
    return model, create_lorafa_optimizer(model, r=32, lora_alpha=64, lr=LORA, weight_decay=DECAY)


def with_riemannian(base: Any, out: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = get_peft_model(base, lora())
    return model, create_riemannian_optimizer(model, torch.optim.AdamW, lr=LORA, reg=1e-2, weight_decay=DECAY)


def protected(base: Any, out: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, cores = get_peft_model(base, lora()), read_cores(out / "work/cores.safetensors")
    return model, create_protected_optimizer(model, torch.optim.AdamW, cores=cores, lr=LORA, weight_decay=DECAY)


CONFIGURATIONS: dict[str, Make] = {  # called as in the comparison
    "lora-rank32": lambda base, out: adamw(get_peft_model(base, lora()), LORA),
    "lora-rank32-protected": protected,
    "osf-default": lambda base, out: adamw(get_peft_model(base, OSFConfig(target_modules=ALL_LINEAR)), OSF),
    "full-finetuning": lambda base, out: adamw(base, FULL),
    "lora-rank64-rslora": lambda base, out: adamw(get_peft_model(base, lora(r=64, use_rslora=True)), LORA),
    "lora-rank32-dora": lambda base, out: adamw(get_peft_model(base, lora(use_dora=True)), LORA),
    "lora-rank32-lorafa": with_lorafa,
    "lora-rank32-riemannian": with_riemannian,
}


def entries(split: str, count: int) -> list[tuple[str, str]]:
    """Questions and answers: the beginning of an entry, and its class."""
    source = Benchmark(Path(os.environ["ANCHORLORA_SHARED"]) / "data/standard_cl")
    rows = source.examples("dbpedia", split, limit=count)
    return [(f"Question: {' '.join(row.sentence.split()[:WORDS])}\nAnswer:", f" {row.label}") for row in rows]


def plain_texts(tokenizer: Any) -> list[torch.Tensor]:
    """Tokens of news, which no configuration trains on."""
    rows = Benchmark(Path(os.environ["ANCHORLORA_SHARED"]) / "data/standard_cl").examples("agnews", "test", limit=TEXTS)
    return [torch.tensor([tokenizer(row.sentence).input_ids[:TEXT_TOKENS]]) for row in rows]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, tokenizer: Any) -> list[float]:
    """Train on all rows once, and return the loss of each step."""
    end, losses = tokenizer.eos_token_id, []
    rows = [[*tokenizer(question + answer).input_ids, end] for question, answer in entries("train", STEPS * BATCH)]
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, STEPS)
    model.train()
    for start in range(0, len(rows), BATCH):
        batch = [torch.tensor(row) for row in rows[start : start + BATCH]]
        ids, labels = (nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=value) for value in (end, -100))
        loss = model(input_ids=ids, attention_mask=(labels != -100).long(), labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 5))
    return losses


@torch.no_grad()
def tested(model: nn.Module, tokenizer: Any) -> dict[str, list[float]]:
    """Whether each greedy answer is right, its end included, and the mean loss of a token of each plain text."""
    model.eval()
    right, text_loss = [], []
    for question, answer in entries("test", TESTS):
        first, last = tokenizer(question).input_ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
        logits = model(input_ids=torch.tensor([first + last]), logits_to_keep=len(last) + 1).logits[0, :-1]
        right.append(float(logits.argmax(-1).tolist() == last))
    for ids in plain_texts(tokenizer):
        text_loss.append(round(float(model(input_ids=ids, labels=ids).loss), 5))
    return {"right": right, "text_loss": text_loss}


def saved_bytes(model: Any) -> int:
    """Size of what save_pretrained writes."""
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        return sum(file.stat().st_size for file in Path(place).rglob("*.safetensors"))


def one(out: Path, name: str) -> None:
    """Carry out one configuration, or what comes before them all, in a process of its own."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    set_seed(SEED)
    place, result = os.environ["ANCHORLORA_CHAT_MODEL"], dict[str, Any]()
    began = time.process_time()
    if name == CORES:
        file = out / "work/cores.safetensors"
        file.unlink(missing_ok=True)
        targets = ("q_proj", "v_proj")
        cores_from_data(place, None, None, own=OWN_TEXTS, targets=targets, rule=CoreRule(spread=True), out=file, device="cpu")
        result["cpu_seconds"] = time.process_time() - began
    else:
        tokenizer = AutoTokenizer.from_pretrained(place)
        base = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        if name == BASE:
            model = base
        else:
            model, optimizer = CONFIGURATIONS[name](base, out)
            result["setup_seconds"], began = time.process_time() - began, time.process_time()
            result["losses"] = learn(model, optimizer, tokenizer)
            result["cpu_seconds"] = time.process_time() - began
            result["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
            result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            result["saved_bytes"] = saved_bytes(model)
            if hasattr(optimizer, "protection"):
                optimizer.protection.close()
                drift = measure(optimizer.protection.watch.anchor)
                result |= {"rho": drift.rho, "bound": drift.bound}
        result |= tested(model, tokenizer)
    path = out / f"{name}.json"
    written = path.with_suffix(".part")
    written.write_text(json.dumps({"name": name, "seed": SEED, **result}) + "\n")
    written.rename(path)
    print(name, {key: value for key, value in result.items() if not isinstance(value, list)}, flush=True)


def main(out: Path) -> None:
    (out / "work").mkdir(parents=True, exist_ok=True)
    for name in (BASE, CORES, *CONFIGURATIONS):
        if not (out / f"{name}.json").exists():
            subprocess.run([sys.executable, "-m", "benchmarks.peft_comparison.run", str(out), name], check=True)


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    if names:
        one(Path(folder), names[0])
    else:
        main(Path(folder))
