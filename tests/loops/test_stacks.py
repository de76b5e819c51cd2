"""axolotl and LLaMA-Factory, which pin versions of everything and are not part of the test extra (`make test-stack`).

Where they are installed, both train here as people start them. axolotl's plugin is also made as axolotl makes it: by its name, with
the YAML file's fields, before the trainer. Where axolotl is missing, `BasePlugin` below stands in, with the signatures of axolotl
0.19.0, so this shows our side alone.
"""

import importlib
import inspect
import json
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import forked
import models
from anchorlora import FeatureStore, ProtectionCallback, measure
from anchorlora.adapters import read_adapter
from anchorlora.errors import InvalidValue, MissingExtra
from anchorlora.features import write_cores
from guards.layers import adapted, directions

NAME = "anchorlora.integrations.axolotl.ProtectionPlugin"
ROWS = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 16


class BasePlugin:
    """Signatures of axolotl 0.19.0, src/axolotl/integrations/base.py."""

    def get_input_args(self): ...

    def add_callbacks_pre_trainer(self, cfg, model): ...


@pytest.fixture
def plugin(monkeypatch):
    module = NAME.rpartition(".")[0]
    if find_spec("axolotl") is None:
        base = ModuleType("axolotl.integrations.base")
        base.BasePlugin = BasePlugin
        for name in ("axolotl", "axolotl.integrations"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, module, raising=False)
    yield getattr(importlib.import_module(module), NAME.rpartition(".")[2])()
    sys.modules.pop(module, None)


def test_hooks_are_those_of_the_base_class(plugin):
    (base,) = type(plugin).__bases__
    for name in (name for name in vars(type(plugin)) if not name.startswith("_")):
        assert list(inspect.signature(getattr(base, name)).parameters) == list(
            inspect.signature(getattr(type(plugin), name)).parameters
        )


def test_fields_of_the_yaml_file_are_described_where_axolotl_looks(plugin):
    module, _, name = plugin.get_input_args().rpartition(".")
    fields = getattr(importlib.import_module(module), name)(anchorlora_cores="x")
    assert fields.model_dump() == {"anchorlora_cores": "x", "anchorlora_also_training": []}


@pytest.mark.parametrize("learned", [True, False], ids=["a learned adapter", "a new block"])
def test_a_training_with_the_plugin_is_protected(plugin, learned, tmp_path):
    model = adapted(learned=learned)
    write_cores(tmp_path / "cores.safetensors", directions(model))
    callbacks = plugin.add_callbacks_pre_trainer({"anchorlora_cores": str(tmp_path / "cores.safetensors")}, model)
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    args = TrainingArguments(str(tmp_path / "out"), max_steps=4, learning_rate=1e-2, **quiet)
    Trainer(model, args, train_dataset=ROWS, callbacks=callbacks).train()
    drift = measure(callbacks[0].anchor)
    assert drift.d_eff > 0
    assert drift.exact


def test_a_file_without_cores_is_refused(plugin):
    with pytest.raises(InvalidValue, match="anchorlora_cores is not set, so nothing would be protected"):
        plugin.add_callbacks_pre_trainer({}, None)


@pytest.mark.skipif(find_spec("axolotl") is not None, reason="axolotl is installed")
def test_without_axolotl_the_plugin_says_what_it_needs():
    with pytest.raises(MissingExtra, match="pip install axolotl"):
        importlib.import_module(NAME.rpartition(".")[0]).ProtectionPlugin()


@pytest.fixture
def old(small_model, tmp_path):
    """A learned adapter on a small model that has a folder, and its cores."""
    torch.manual_seed(5)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32), LoraConfig(**settings))
    model.save_pretrained(str(tmp_path / "old"))
    store = FeatureStore(limit=64)
    with store.collect(model):
        model(input_ids=models.tokens(vocab=200))
    return tmp_path / "old", store.cores()


STAGES = {  # what LLaMA-Factory calls them: rows, and which column is what
    "sft": ({"output": "w2 w3"}, {}),
    "dpo": ({"chosen": "w2 w3", "rejected": "w4"}, {"ranking": True, "columns": {"chosen": "chosen", "rejected": "rejected"}}),
    "kto": ({"output": "w2 w3"}, {"columns": {"response": "output", "kto_tag": "kto_tag"}}),
}


@pytest.mark.skipif(find_spec("llamafactory") is None, reason="LLaMA-Factory is not installed")
@pytest.mark.parametrize("stage", STAGES)
def test_llama_factory_trains_under_the_callback(stage, small_model, old, tmp_path):
    forked.alone(by_llama_factory, stage, small_model, *old, tmp_path, said=tmp_path / "said")


def by_llama_factory(stage, small_model, adapter, cores, tmp_path):
    for name in ("torchaudio", "torchvision"):  # it imports them, and their builds belong to one of torch's
        if find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
    from llamafactory.train.tuner import run_exp

    (answer, how), folder = STAGES[stage], tmp_path / "rows"
    folder.mkdir()
    rows = [{"instruction": f"say {i}", "input": "", **answer, "kto_tag": i % 2 == 0} for i in range(16)]
    if "columns" in how:
        how = how | {"columns": {"prompt": "instruction", "query": "input", **how["columns"]}}
    (folder / "new.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"new": {"file_name": "new.json", **how}}))
    callback = ProtectionCallback(cores=cores)
    run_exp(
        {
            "stage": stage, "do_train": True, "model_name_or_path": str(small_model), "adapter_name_or_path": str(adapter),
            "finetuning_type": "lora", "lora_target": "q_proj,v_proj", "dataset": "new", "dataset_dir": str(folder),
            "template": "empty", "cutoff_len": 64, "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 4,
            "max_steps": 4, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "save_strategy": "no",
        },
        callbacks=[callback],
    )  # fmt: skip
    assert_kept(callback, adapter, tmp_path / "out")


@pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed")
def test_axolotl_trains_with_the_plugin(small_model, old, tmp_path):
    forked.alone(by_axolotl, small_model, *old, tmp_path, said=tmp_path / "said")


def by_axolotl(small_model, adapter, cores, tmp_path):
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    write_cores(tmp_path / "cores.safetensors", cores)
    rows = [{"instruction": f"say {i}", "input": "", "output": "w2 w3"} for i in range(16)]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {
        "base_model": str(small_model), "lora_model_dir": str(adapter), "adapter": "lora", "lora_r": 4, "lora_alpha": 8,
        "lora_target_modules": ["q_proj", "v_proj"], "plugins": [NAME], "anchorlora_cores": str(tmp_path / "cores.safetensors"),
        "datasets": [{"path": str(tmp_path / "new.jsonl"), "ds_type": "json", "type": "alpaca"}], "sequence_len": 256,
        "dataset_prepared_path": str(tmp_path / "prepared"), "output_dir": str(tmp_path / "out"), "micro_batch_size": 4,
        "gradient_accumulation_steps": 1, "max_steps": 4, "learning_rate": 1e-2, "optimizer": "adamw_torch", "bf16": False,
        "lr_scheduler": "constant", "save_strategy": "no", "val_set_size": 0, "use_cpu": True,
        **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False),
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(fields))  # JSON is YAML
    config = load_cfg(str(tmp_path / "config.yaml"))
    _, _, trainer = train(cfg=config, dataset_meta=load_datasets(cfg=config, cli_args=TrainerCliArgs()))
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, ProtectionCallback))
    assert_kept(callback, adapter, tmp_path / "out")


def assert_kept(callback, before, after):
    """Live, and dense in float64 in the files that the stack has saved: A moved off the core, and B not at all."""
    drift = measure(callback.anchor)
    assert drift.exact
    assert drift.d_eff > 0
    now, then = read_adapter(after), read_adapter(before)
    for layer in callback.anchor.layers:
        moved = now[layer.name].A.double() - then[layer.name].A.double()
        assert float((moved @ layer.core.basis.double()).norm()) <= 1e-6 * float(now[layer.name].A.norm()) < float(moved.norm())
        assert torch.equal(now[layer.name].B, then[layer.name].B)
