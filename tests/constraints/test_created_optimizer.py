"""`create_protected_optimizer` against the `with protect(..)` block that it stands for, and in transformers' Trainer."""

import copy
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import models
from anchorlora import (
    Anchor,
    AnswerSensitivity,
    Freeze,
    KroneckerBrake,
    ProjectDisplacement,
    ProjectGradient,
    ProtectionCallback,
    Retract,
    SensitiveCore,
    Subspace,
    measure,
    protect,
)
from anchorlora.adapters import lora_layers
from anchorlora.constraints import create_protected_optimizer
from anchorlora.errors import ProtectionLost
from anchorlora.features import write_cores

RECIPES = {"learned": [Freeze("B")], "fresh": [Retract("A")]}
IDS = models.tokens()
COMPARISON = Path(__file__).parents[2] / "benchmarks/peft_comparison"


def adapted(kind):
    torch.manual_seed(0)
    model = get_peft_model(models.qwen3(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    cores = {}
    for name, layer in lora_layers(model).items():
        cores[name] = torch.linalg.qr(torch.randn(layer.in_features, 5)).Q
        if kind == "learned":
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return model, cores


def steps(model, optimizer, count=6):
    for _ in range(count):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.SGD])
def test_it_is_the_block_that_it_stands_for_bitwise(kind, optimizer_cls):
    model, cores = adapted(kind)
    other = copy.deepcopy(model)
    optimizer = create_protected_optimizer(model, optimizer_cls, cores=cores, lr=1e-2)
    steps(model, optimizer)
    optimizer.protection.close()
    anchor = Anchor.of(other, cores=cores)
    plain = optimizer_cls([p for p in other.parameters() if p.requires_grad], lr=1e-2)
    with protect(plain, anchor, [*RECIPES[kind], ProjectGradient("A"), ProjectDisplacement("A")]):
        steps(other, plain)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert measure(anchor).exact
    assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n), "released"


def test_a_trainer_that_is_given_the_optimizer_protects(tmp_path):
    model, cores = adapted("learned")
    optimizer = create_protected_optimizer(model, torch.optim.AdamW, cores=cores, lr=1e-2)
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS.tolist()])
    named = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "per_device_train_batch_size": 2, "num_train_epochs": 2}
    Trainer(model, TrainingArguments(str(tmp_path), **named), train_dataset=rows, optimizers=(optimizer, None)).train()
    optimizer.protection.close()
    assert optimizer.protection.step == 8
    found = measure(optimizer.protection.watch.anchor)
    assert found.exact
    assert found.d_eff > 0, "it trained"


def test_the_branch_of_the_draft_for_pefts_comparison_makes_it_of_the_rows_own_files(tmp_path):
    """What the patch adds to PEFT's `get_optimizer_and_scheduler`, with the row's adapter and training parameters."""
    (config,) = COMPARISON.rglob("adapter_config.json")
    asked = json.loads((config.parent / "training_params.json").read_text())
    added = [line[1:] for line in (COMPARISON / "utils.patch").read_text().splitlines() if re.match(r"\+( |$)", line)]
    where = added.index(f'    elif optimizer_type == "{asked["optimizer_type"]}":')
    torch.manual_seed(0)
    model = get_peft_model(models.llama(), PeftConfig.from_pretrained(config.parent))
    cores = {name: Subspace(torch.linalg.qr(torch.randn(layer.in_features, 5)).Q) for name, layer in lora_layers(model).items()}
    write_cores(tmp_path / "c.safetensors", cores)
    names = {"model": model, "torch": torch, "optimizer_kwargs": asked["optimizer_kwargs"] | {"cores": tmp_path / "c.safetensors"}}
    exec(textwrap.dedent("\n".join(added[where + 1 :])), names)
    optimizer = names["optimizer"]
    steps(model, optimizer)
    optimizer.protection.close()
    drift = measure(optimizer.protection.watch.anchor)
    assert drift.d_eff > 0
    assert drift.exact


def test_own_constraints_count_nothing_to_protect_is_refused_and_a_loss_of_protection_is_said_at_the_end():
    model, cores = adapted("fresh")
    with pytest.raises(ValueError, match="no cores are given, so nothing would be protected"):
        create_protected_optimizer(model, torch.optim.AdamW, cores={})
    with pytest.raises(ValueError, match="nothing in this model trains; load the adapter with is_trainable=True"):
        create_protected_optimizer(copy.deepcopy(model).requires_grad_(False), torch.optim.AdamW, cores=cores)
    optimizer = create_protected_optimizer(
        model, torch.optim.AdamW, cores=cores, constraints=[Retract("A"), ProjectDisplacement("A")], lr=1e-2
    )
    steps(model, optimizer)
    name, layer = next(iter(lora_layers(model).items()))
    with torch.no_grad():
        layer.lora_A["default"].weight += (torch.randn(4, 5) @ cores[name].T).float()
    with pytest.raises(ProtectionLost):
        optimizer.protection.close()
    optimizer.protection.close()  # released already


def test_a_new_block_that_is_trained_on_still_trains_both_factors_because_it_does_not_read_the_core():
    model, cores = adapted("fresh")
    first = Anchor.of(model, cores=cores)
    for _ in range(2):
        blocks = [layer.lora_B["default"].weight for layer in lora_layers(model).values()]
        before = [B.detach().clone() for B in blocks]
        optimizer = create_protected_optimizer(model, torch.optim.AdamW, cores=cores, lr=1e-2)
        steps(model, optimizer)
        optimizer.protection.close()
        assert not any(torch.equal(B, b) for B, b in zip(blocks, before, strict=True))
        assert measure(first).exact
        assert measure(first).d_new > 1e-3


def test_with_what_the_past_depends_on_the_default_is_the_recipe_of_the_six_lines(tmp_path):
    def losses(count):
        for row in IDS[:count]:
            yield model(input_ids=row[None], labels=row[None]).loss

    model, _ = adapted("fresh")
    past = AnswerSensitivity(2).end_task(Anchor.of(model, losses=losses))
    kept = {"cores": SensitiveCore(1.0, 4, 4).cores(past), "past": past}
    others = [copy.deepcopy(model) for _ in range(3)]
    optimizer = create_protected_optimizer(model, torch.optim.AdamW, **kept, lr=1e-2)
    steps(model, optimizer)
    optimizer.protection.close()
    assert [type(c).__name__ for c in optimizer.protection][-1] == "_Braking"
    plain = torch.optim.AdamW([p for p in others[0].parameters() if p.requires_grad], lr=1e-2)
    with protect(
        plain, Anchor.of(others[0], **kept), [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A"), KroneckerBrake()]
    ):
        steps(others[0], plain)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), others[0].parameters(), strict=True))
    rows = Dataset.from_list([{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS])
    quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "max_steps": 4, "learning_rate": 1e-2}
    for other, extra in zip(others[1:], (kept, {"cores": kept["cores"]}), strict=True):
        callback = ProtectionCallback(**extra)
        Trainer(other, TrainingArguments(str(tmp_path), **quiet), train_dataset=rows, callbacks=[callback]).train()
        assert measure(callback.anchor).exact
    braked, free = (sum(float(change.norm()) for change in blocks_of(other)) for other in others[1:])
    assert braked < free


def blocks_of(model):
    return [(layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach() for layer in lora_layers(model).values()]


def test_what_trains_beside_is_refused_unless_it_is_named():
    settings = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(models.qwen3(), settings)
    cores = {name: torch.linalg.qr(torch.randn(layer.in_features, 5)).Q for name, layer in lora_layers(model).items()}
    with pytest.raises(ValueError, match="also_training"):
        create_protected_optimizer(model, torch.optim.AdamW, cores=cores, lr=1e-2)
    with pytest.warns(UserWarning, match="nothing keeps what trains beside"):
        optimizer = create_protected_optimizer(model, torch.optim.AdamW, cores=cores, also_training=["lm_head"], lr=1e-2)
    steps(model, optimizer)
    optimizer.protection.close()
    drift = measure(optimizer.protection.watch.anchor)
    assert drift.d_old <= 1e-6 < drift.d_new
    assert drift.unprotected == ("base_model.model.lm_head.modules_to_save.default",)
