"""A second stage on an adapter that has a skill: DPO after SFT, with and without protection, on a real chat model.

First stage, SFT (a LoRA adapter of rank 8 on all linear layers): a title and the first words of an encyclopedia entry in, a
card such as {"class": "Village"} out. Second stage, DPO: of two beginnings of one real answer to a question, the longer one is
preferred. The skill is the share of test entries whose greedy answer is the card, end included; preferences are tested on other
pairs.

    before          the adapter after the first stage
    plain           DPO on that adapter, as TRL's documentation shows it
    lower rate      the same at a fifth of the learning rate
    old pairs       the same, with 16 old entries among the pairs (chosen: the card) and the SFT loss of what is chosen added
    shared          DPO on that adapter: A protected, B frozen
    fresh block     DPO on a new block beside it: A off the core, then protected

Run: ANCHORLORA_SHARED=FOLDER ANCHORLORA_CHAT_MODEL=FOLDER python -m benchmarks.second_stage OUT [SEED ..]; called again, only what
is missing. OUT/*.json are the results.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from anchorlora import AdapterStack, Freeze, ProjectDisplacement, ProjectGradient, ProtectionCallback, Retract, measure
from anchorlora.adapters.stack import CURRENT, HISTORY
from anchorlora.data import Benchmark
from anchorlora.features import read_cores
from anchorlora.models.cores_from_text import CoreRule, cores_from_data

SEEDS = (38, 42)
CARDS, CARD_TESTS, WORDS = 240, 100, 14  # training and test entries; words of an entry
PAIRS, PAIR_TESTS, LONG, SHORT = 48, 24, 16, 6  # training and test pairs; words of the longer and the shorter answer
OLD_PAIRS = 16
SFT_RATE, DPO_RATE, LOWER, BETA, RANK = 1e-3, float(os.environ.get("ANCHORLORA_DPO_RATE", "1e-3")), 5, 0.1, 8
FIRST = "before"
VARIANTS = ("plain", "lower rate", "old pairs", "shared", "fresh block")
TEMPLATE = (  # the model's own, without the system message that it adds
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Rows = list[dict[str, Any]]


def model_and_tokenizer() -> tuple[Any, Any]:
    """The chat model in float32, and its tokenizer."""
    name = os.environ["ANCHORLORA_CHAT_MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = TEMPLATE
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), tokenizer


def turn(role: str, content: str) -> Rows:
    return [{"role": role, "content": content}]


def cards() -> tuple[Rows, Rows]:
    """Training and test entries: prompt, completion."""
    source = Benchmark(Path(os.environ["ANCHORLORA_SHARED"]) / "data/standard_cl")

    def rows(split: str, count: int) -> Rows:
        return [
            {
                "prompt": turn("user", " ".join(example.sentence.split()[:WORDS])),
                "completion": turn("assistant", json.dumps({"class": example.label})),
            }
            for example in source.examples("dbpedia", split, limit=count)
        ]

    return rows("train", CARDS), rows("test", CARD_TESTS)


def pairs() -> tuple[Rows, Rows]:
    """Training and test pairs: prompt, chosen, rejected; both are beginnings of the same answer."""
    source = Benchmark(Path(os.environ["ANCHORLORA_SHARED"]) / "data/standard_cl")
    rows: Rows = []
    for example in source.examples("yahoo", "train", limit=2000):
        title, _, rest = example.sentence.removeprefix("Title: ").partition("\n")
        answer = rest.rpartition("Answer: ")[2].split()
        if len(answer) >= LONG and 4 <= len(title.split()) <= 10:
            longer, shorter = " ".join(answer[:LONG]), " ".join(answer[:SHORT])
            rows.append(
                {"prompt": turn("user", title), "chosen": turn("assistant", longer), "rejected": turn("assistant", shorter)}
            )
    return rows[:PAIRS], rows[PAIRS : PAIRS + PAIR_TESTS]


def token_log_probabilities(model: Any, tokenizer: Any, prompt: Rows, answer: Rows) -> tuple[Tensor, bool]:
    """Log probability of each token of an answer, its end included; and whether greedy decoding gives that answer."""
    start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    end = f"{answer[0]['content']}<|im_end|>"
    first, last = (tokenizer(text, add_special_tokens=False).input_ids for text in (start, end))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([first + last]), logits_to_keep=len(last) + 1).logits[0, :-1]
    target = torch.tensor(last)
    return logits.log_softmax(-1).gather(1, target[:, None])[:, 0], bool((logits.argmax(-1) == target).all())


def tested(model: Any, tokenizer: Any) -> dict[str, list[float]]:
    """The skill on each test entry, and the log probabilities of both answers of each test pair."""
    model.eval()
    entries = [token_log_probabilities(model, tokenizer, r["prompt"], r["completion"]) for r in cards()[1]]
    sums = {
        name: [float(token_log_probabilities(model, tokenizer, r["prompt"], r[name])[0].sum()) for r in pairs()[1]]
        for name in ("chosen", "rejected")
    }
    return {
        "card": [float(right) for _, right in entries],
        "card_loss": [round(float(-logs.mean()), 5) for logs, _ in entries],
        **{name: [round(value, 4) for value in values] for name, values in sums.items()},
    }


def options(folder: Path, seed: int, rate: float) -> dict[str, Any]:
    """What both stages share."""
    return {
        "output_dir": str(folder), "learning_rate": rate, "seed": seed, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "num_train_epochs": 1, "optim": "adamw_torch", "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "max_length": 256,
    }  # fmt: skip


def first_stage(out: Path, seed: int) -> dict[str, Any]:
    """SFT on cards; the adapter and its cores are kept for the second stage."""
    model, tokenizer = model_and_tokenizer()
    train, _ = cards()
    before = {"base": tested(model, tokenizer)} if seed == SEEDS[0] else {}
    torch.manual_seed(seed)
    model = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0)
    )
    config = SFTConfig(**options(out / "work", seed, SFT_RATE), per_device_train_batch_size=8)
    SFTTrainer(model, config, train_dataset=Dataset.from_list(train), processing_class=tokenizer).train()
    adapter = out / f"work/adapter-{seed}"
    model.save_pretrained(adapter)
    tokenizer.save_pretrained(adapter)
    texts = [
        {"text": tokenizer.apply_chat_template([*r["prompt"], *r["completion"]], tokenize=False).removesuffix("\n")} for r in train
    ]
    cores = out / f"work/cores-{seed}.safetensors"
    cores.unlink(missing_ok=True)
    cores_from_data(os.environ["ANCHORLORA_CHAT_MODEL"], adapter, texts, rule=CoreRule(spread=True), out=cores, device="cpu")
    return {**before, "scores": tested(model, tokenizer)}


def second_stage(out: Path, seed: int, variant: str) -> dict[str, Any]:
    """DPO from the first stage's adapter, one way."""
    model, tokenizer = model_and_tokenizer()
    adapter = out / f"work/adapter-{seed}"
    protection, more = None, {}
    rows, rate = pairs()[0], DPO_RATE
    if variant == "fresh block":
        blocks = AdapterStack.continuing(model, adapter, rank=RANK, seed=seed)
        peft_model: Any = blocks.model
        constraints = [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]
        named = {"adapter_name": CURRENT, "history": HISTORY}
    else:
        peft_model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
        constraints, named = [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")], {}
    if variant in ("fresh block", "shared"):
        protection = ProtectionCallback(constraints, cores=read_cores(out / f"work/cores-{seed}.safetensors"), **named)
    if variant == "lower rate":
        rate /= LOWER
    if variant == "old pairs":
        old = [
            {"prompt": r["prompt"], "chosen": r["completion"], "rejected": turn("assistant", r["prompt"][0]["content"])}
            for r in cards()[0][:OLD_PAIRS]
        ]
        rows = random.Random(seed).sample([*rows, *old], len(rows) + len(old))
        more = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}
    config = DPOConfig(**options(out / "work", seed, rate), per_device_train_batch_size=4, beta=BETA, **more)
    callbacks = [protection] if protection else []
    began = time.process_time()
    DPOTrainer(
        peft_model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=callbacks
    ).train()
    seconds = time.process_time() - began
    peft_model.base_model.set_adapter([CURRENT, HISTORY] if variant == "fresh block" else "default")
    drift = {} if protection is None else {"rho": measure(protection.anchor).rho, "bound": measure(protection.anchor).bound}
    return {"scores": tested(peft_model, tokenizer), "cpu_seconds": seconds, **drift}


def one(out: Path, seed: int, variant: str) -> None:
    """Carry out one variant, in a process of its own."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    result = first_stage(out, seed) if variant == FIRST else second_stage(out, seed, variant)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    path = result_path(out, seed, variant)
    written = path.with_suffix(".part")
    written.write_text(json.dumps({"variant": variant, "seed": seed, "rate": DPO_RATE, "peak": peak, **result}) + "\n")
    written.rename(path)
    scores = result["scores"]
    skill, loss = (sum(scores[name]) / CARD_TESTS for name in ("card", "card_loss"))
    margin = sum(c - r for c, r in zip(scores["chosen"], scores["rejected"], strict=True)) / PAIR_TESTS
    seconds, rho = result.get("cpu_seconds", 0), result.get("rho")
    print(
        f"{seed} {variant:12} card {100 * skill:.0f} % {loss:.3f}, margin {margin:.1f}, {seconds:.0f} CPU seconds, {rho}",
        flush=True,
    )


def result_path(out: Path, seed: int, variant: str) -> Path:
    return out / f"{variant.replace(' ', '-')}-{seed}.json"


def main(out: Path, seeds: Sequence[int]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for variant in (FIRST, *VARIANTS):
            if not result_path(out, seed, variant).exists():
                subprocess.run([sys.executable, "-m", "benchmarks.second_stage", str(out), str(seed), variant], check=True)


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    if len(rest) == 2 and not rest[1].isdecimal():
        one(Path(folder), int(rest[0]), rest[1])
    else:
        main(Path(folder), [int(seed) for seed in rest] or SEEDS)
