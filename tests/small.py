"""A small complete setting on disk: model folder, benchmark folder, recipe.  One run takes about a second."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

import models
from anchorlora.config import Recipe
from anchorlora.data import Benchmark
from anchorlora.recipes import standard_cl

TASKS = {"TC/fruit": ["apple", "pear"], "SC/mood": ["glad", "sad", "calm"], "TC/metal": ["iron", "gold"]}
ORDER = ("fruit", "mood", "metal")
PLAIN = {"TC/toys": ["ball", "doll"], "SC/views": ["good", "bad"], "COPA/COPA": ["A", "B"]}


def write_benchmark(root: Path, *, train: int = 24, test: int = 6) -> Path:
    draw = random.Random(5)
    for path, labels in TASKS.items():
        folder = root / path
        folder.mkdir(parents=True)
        (folder / "labels.json").write_text(json.dumps(labels))
        for split, count in (("train", train), ("test", test)):
            rows = []
            for i in range(count):
                label = labels[i % len(labels)]
                filler = " ".join(draw.choice(["a", "the", "some", "old", "new"]) for _ in range(draw.randint(2, 9)))
                rows.append({"label": label, "sentence": f"{filler} {label}ish {split} {i}\n"})
            (folder / f"{split}.json").write_text(json.dumps(rows))
    config = {group: [{"instruction_type": "zero-shot", "instruction": "Choose.\n"}] for group in ("TC", "SC")}
    (root / "instruction_config.json").write_text(json.dumps(config))
    return root


def write_folders(root: Path, *, train: int = 12, test: int = 6, instructions: bool = True) -> Path:
    """A benchmark of other tasks, with instructions or without."""
    for path, labels in PLAIN.items():
        folder = root / path
        folder.mkdir(parents=True)
        (folder / "labels.json").write_text(json.dumps(labels))
        for split, count in (("train", train), ("test", test)):
            rows = [{"label": labels[i % 2], "sentence": f"{split} passage {i} about a {labels[i % 2]}\n"} for i in range(count)]
            (folder / f"{split}.json").write_text(json.dumps(rows, indent=0))
    if instructions:
        texts = {"TC": "Which toy?\n", "SC": "Which view?\n"}
        config = {group: [{"instruction_type": "zero-shot", "instruction": text}] for group, text in texts.items()}
        (root / "instruction_config.json").write_text(json.dumps(config))
    return root


def write_model(root: Path, benchmark: Path) -> Path:
    source = Benchmark(benchmark)
    texts = [source.task(n).prompt(e.sentence) + e.label for n in ORDER for e in source.examples(n, "train")]
    tokenizer = models.tokenizer(texts, size=420)
    torch.manual_seed(11)
    model = models.qwen3(vocab=len(tokenizer))
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root


def roomy(recipe: Recipe, method: str) -> Recipe:
    """The recipe, with a rank above the directions of the core where the method needs that."""
    return recipe.changed({"rank": 8}) if method == "rank-split" else recipe


def recipe(benchmark: Path, model: Path, **changes) -> Recipe:
    settings = {
        "data": str(benchmark),
        "model": str(model),
        "learning_rate": 5e-3,
        "micro_batch": 4,
        "rank": 4,
        "alpha": 16,
        "max_tokens": 96,
        "max_new_tokens": 6,
        "threads": 1,
    }
    return standard_cl().changed(settings | changes)
