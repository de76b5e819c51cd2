"""axolotl's plugin, made as axolotl makes it: by its name, with the YAML file's fields, before the trainer.

axolotl pins versions of everything and is not part of the test extra. Where it is missing, `BasePlugin` below stands in, with the
signatures of axolotl 0.19.0, so this shows our side alone; where it is installed, its own base class is checked.
"""

import importlib
import inspect
import sys
from types import ModuleType

import pytest
from transformers import Trainer, TrainingArguments

from anchorlora import measure
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
    if importlib.util.find_spec("axolotl") is None:
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


@pytest.mark.skipif(importlib.util.find_spec("axolotl") is not None, reason="axolotl is installed")
def test_without_axolotl_the_plugin_says_what_it_needs():
    with pytest.raises(MissingExtra, match="pip install axolotl"):
        importlib.import_module(NAME.rpartition(".")[0]).ProtectionPlugin()
