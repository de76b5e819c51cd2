"""A folder of MMLU's 57 subjects with made-up rows, and a small model that answers them differently; scored here by hand too."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import models
from anchorlora.adapters import write_adapter
from anchorlora.geometry import Factors
from anchorlora_lab.suites.mmlu import SUBJECTS

ROWS = {"dev": 1, "test": 2}
WORDS = ["bone", "acid", "war", "tax", "verb", "atom", "king", "loan", "cell", "law", "moon", "debt"]


def write_folder(root: Path) -> Path:
    draw = random.Random(3)
    for split, count in ROWS.items():
        (root / split).mkdir(parents=True)
        for subject in SUBJECTS:
            with (root / split / f"{subject}_{split}.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(_row(draw, i) for i in range(count))
    return root


def _row(draw: random.Random, i: int) -> list[str]:
    said = " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 12)))
    question = (f"  Which {said}?", f'"{said}", he said,\nand left; why — because of:\n')[i % 2]
    return [question, *draw.sample(WORDS, 3), "", draw.choice("ABCD")]


def write_model(root: Path) -> Path:
    texts = [f"The following are multiple choice questions {' '.join(WORDS)}\nA. B. C. D. Answer: A"]
    tokenizer = models.tokenizer(texts, size=400)
    torch.manual_seed(4)
    model = models.qwen3(vocab=len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)  # far from flat: answers depend on the question
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root


def write_an_adapter(root: Path, model: Path, *, size: float, seed: int = 0) -> Path:
    """A rank-2 adapter on every q_proj and v_proj whose B has entries of about `size`."""
    draw, config = torch.Generator().manual_seed(seed), AutoConfig.from_pretrained(model)
    heads, d = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}, config.hidden_size
    factors = {}
    for layer in range(config.num_hidden_layers):
        for name, count in heads.items():
            A = torch.randn(2, d, generator=draw) / d**0.5
            B = size * torch.randn(count * config.head_dim, 2, generator=draw)
            factors[f"model.layers.{layer}.self_attn.{name}"] = Factors(A, B, 2.0)
    write_adapter(root, factors, base=str(model))
    return root


def answers_by_hand(
    folder: Path, model: Path, *, adapter: Path | None = None, limit: int | None = None
) -> dict[str, list[tuple[int, int]]]:
    """Subject -> (likeliest answer, right answer) of each test row: the prompt read alone, in float32, without lm_eval."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, adapter).eval()
    found = {}
    for subject in SUBJECTS:
        with (folder / f"test/{subject}_test.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[:limit]
        found[subject] = [(_likeliest(network, tokenizer, prompt(subject, row)), "ABCD".index(row[5])) for row in rows]
    return found


def prompt(subject: str, row: list[str]) -> str:
    about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    a, b, c, d = row[1:5]
    return f"{about}{row[0].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"


def _likeliest(network, tokenizer, text: str) -> int:
    scores = []
    known = len(tokenizer(text).input_ids)
    for letter in "ABCD":
        ids = torch.tensor([tokenizer(f"{text} {letter}").input_ids])
        with torch.no_grad():
            logs = torch.log_softmax(network(ids).logits[0].float(), dim=-1)
        scores.append(sum(float(logs[i - 1, ids[0, i]]) for i in range(known, ids.shape[1])))
    return max(range(4), key=lambda i: scores[i])
