"""The part of docs/protect.md on trainers, from its beginning to the end: its commands and its Python in order, on a tiny model."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from anchorlora import ProtectionCallback, measure
from anchorlora.adapters import read_adapter
from anchorlora.cli.app import main

FILE = Path(__file__).parents[2] / "docs/protect.md"
BEGIN = "## With TRL or transformers' Trainer\n"
PAGE = "".join(FILE.read_text().partition(BEGIN)[1:])
MODEL = "Qwen/Qwen3-0.6B"
EPS = torch.finfo(torch.float32).eps

pytest.importorskip("trl", reason="trl is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # what the trainers themselves warn of is theirs


class Reader:
    """Does what the page says, in a folder of its own, and remembers what it saw."""

    def __init__(self, model):
        self.model, self.objects, self.drifts, self.live = model, {}, [], {}

    def follow(self, language, code):
        code = code.replace(MODEL, str(self.model))
        if language == "python":
            exec(compile(code, FILE.name, "exec"), self.objects)
            self.look()
            return
        for line in code.splitlines():
            if line.startswith("anchorlora "):
                assert main(shlex.split(line, comments=True)[1:]) == 0, line

    def look(self):
        """What the trained model computes, and how it drifted, as soon as a block has trained one."""
        protection = self.objects.get("protection")
        assert isinstance(protection, ProtectionCallback)
        folder = "shared" if "model" in self.objects else "beside"
        if folder not in self.live:
            self.drifts.append(measure(protection.anchor))
            self.live[folder] = logits(self.objects["trainer"].model)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None]).logits.float().cpu()


@pytest.fixture(scope="module")
def followed(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.1)
    get_peft_model(AutoModelForCausalLM.from_pretrained(small_model), config).save_pretrained(str(folder / "adapters/old"))
    for name in ("old", "new"):
        rows = [{"text": f"the {name} fruit {i} is {'very ' * (i % 4)}{name}"} for i in range(24)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = Reader(small_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        for language, code in re.findall(r"```(python|bash)\n(.*?)```", PAGE, flags=re.S):
            reader.follow(language, code)
    return folder, reader


def test_both_ways_learn_and_leave_the_old_directions_alone(followed):
    _, reader = followed
    assert len(reader.drifts) == 2
    for drift in reader.drifts:
        assert drift.d_eff > 0
        assert drift.rho <= max(1e-7, 3 * drift.rho_floor)


def test_measure_on_disk_says_protected_for_both(followed, monkeypatch, capsys):
    folder, _ = followed
    monkeypatch.chdir(folder)
    lines = [line for line in PAGE.splitlines() if line.startswith("anchorlora measure")]
    assert len(lines) == 2
    for line in lines:
        assert main([*shlex.split(line)[1:], "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["exact"]
        assert found["d_eff"] > 0


@pytest.mark.parametrize("kind", ["shared", "beside"])
def test_one_ordinary_adapter_computes_what_was_trained(kind, followed, small_model):
    folder, reader = followed
    assert {path.name for path in (folder / "adapters" / kind).iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    served = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model), str(folder / "adapters" / kind))
    expected = reader.live[kind]
    assert float((logits(served) - expected).abs().max()) <= 100 * EPS * float(expected.abs().max())
    old, new = (read_adapter(folder / "adapters" / name) for name in ("old", kind))
    for layer, before in old.items():
        assert new[layer].rank == before.rank + (8 if kind == "beside" else 0)
        assert torch.equal(new[layer].B[:, : before.rank], before.B), "B of the old adapter stays bit for bit"
