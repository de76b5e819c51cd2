"""What is tried with every architecture: protection in a loop of one's own, cores from text, a run, and its exports."""

from __future__ import annotations

import json
import warnings

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from anchorlora import METHODS, Anchor, FeatureStore, Freeze, ProjectDisplacement, ProjectGradient, measure, protect, run_sequence
from anchorlora.adapters import target_layers
from anchorlora.export.export import Request, export
from anchorlora.export.source import export_source
from anchorlora.models.cores_from_text import CoreRule, cores_from_data
from anchorlora.pages.card import card
from anchorlora.recipes import mini
from anchorlora.runs.sizes import sizes

STEPS = 25
TASKS = ["reviews", "news"]
CHANGES = {"train_limit": 24, "test_limit": 2, "epochs": 1, "max_new_tokens": 2, "rank": 4, "alpha": 16, "learning_rate": 5e-3}


def tokens(task, vocabulary):
    """Ids and mask (6, 14) of one task, padded on the left."""
    draw = torch.Generator().manual_seed(100 + task)
    mask = (torch.arange(14) >= torch.randint(5, (6, 1), generator=draw)).long()
    return {
        "input_ids": torch.randint(vocabulary // 2, (6, 14), generator=draw) + vocabulary // 2 * (task - 1),
        "attention_mask": mask,
    }


def adapted(model, layers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it takes Conv1D
        found = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=sorted(layers), task_type="CAUSAL_LM"))
    return found.train()


def learn(model, optimizer, batch, steps):
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for _ in range(steps):
        model(**batch, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def protection(model, targets):
    """rho of a second task in a loop of one's own, over the adapter of a first one; fails where a layer hardly moved."""
    vocabulary = model.config.get_text_config().vocab_size
    model = adapted(model, target_layers(model, targets))
    trained = [p for p in model.parameters() if p.requires_grad]
    store = FeatureStore(limit=48, held_out=8)
    with store.collect(model):
        learn(model, torch.optim.AdamW(trained, lr=1e-2), tokens(1, vocabulary), 8)
    anchor = Anchor.of(model, cores=store.cores(at_most=6))
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    with protect(optimizer, anchor, [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]):
        learn(model, optimizer, tokens(2, vocabulary), STEPS)
    drift = measure(anchor)
    assert min(layer.d_eff for layer in drift.layers.values()) > 1e-4, "a layer has not learned"
    assert drift.exact, f"rho {drift.rho:.1e}, and rounding explains {drift.bound:.1e}"
    return drift.rho


def saved_adapter(folder, targets, to):
    """An adapter of some content, made and saved by PEFT alone."""
    model = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0]).from_pretrained(folder)
    model = adapted(model, target_layers(model, targets))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=draw) / 10)
    model.save_pretrained(to)
    return set(target_layers(model.unload(), targets))


def cores(folder, targets, at):
    """Cores of a saved adapter from text."""
    layers = saved_adapter(folder, targets, at / "adapter")
    text = [{"text": "The bridge crosses the river near the old mill, and nobody has mended it since the flood."}] * 3
    made = cores_from_data(folder, at / "adapter", text, rule=CoreRule(rows=32, at_most=6), device="cpu")
    assert set(made.cores) == layers
    assert all(4 <= core.k <= 6 for core in made.cores.values())
    return "yes"


def run(folder, targets, out):
    """The record of two tasks under sfor."""
    recipe = mini().changed({**CHANGES, "model": str(folder), "targets": targets})
    estimate = sizes(recipe, tasks=len(TASKS), cumulative=False)
    record = run_sequence(recipe, METHODS["sfor"], order=TASKS, seed=42, out=out)
    drift = record.drift[0]
    assert estimate.layers == len(record.layers[0])
    assert drift.d_eff > 1e-3
    assert drift.rho <= max(1e-7, 3 * drift.rho_floor), f"rho {drift.rho:.1e}"
    return drift.rho


def exports(folder, out, to):
    """The forms whose logits are those of the adapter of the run, which plain PEFT loads without a warning."""
    ids = {"input_ids": torch.arange(5, 25).view(2, 10)}
    task = next(out.glob("tasks/2-*"))

    def logits(model):
        with torch.no_grad():
            return model.eval()(**ids).logits.float()

    def base():
        return AutoModelForCausalLM.from_pretrained(folder)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT's use of transformers
        expected = logits(PeftModel.from_pretrained(base(), task / "adapter"))
        bare, found = logits(base()), {}
        assert float((expected - bare).abs().max()) > 1e-4, "the adapter does nothing"
        for form, request in {"cat": Request("cat"), "svd": Request("svd", rank=4), "merged": Request("merged")}.items():
            export(export_source(task), request, to=to / form, card=card)
            if form == "merged":
                model = AutoModelForCausalLM.from_pretrained(to / form)
                assert AutoTokenizer.from_pretrained(to / form)("news").input_ids
            else:
                model = PeftModel.from_pretrained(base(), to / form)
            found[form] = float((logits(model) - expected).abs().max() / expected.abs().max())
    assert max(found.values()) < 1e-5, found
    return ", ".join(found)
