"""`anchorlora cores`: what it prints, what `measure` makes of its file, and what it refuses."""

import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from anchorlora.adapters import read_adapter, write_adapter
from anchorlora.cli.app import main
from anchorlora.features.files import read_cores
from anchorlora.geometry import Factors
from golden import assert_golden, one_line


@pytest.fixture(scope="module")
def place(small_model, tmp_path_factory):
    """A folder with an old adapter and a sample of its task's text."""
    folder = tmp_path_factory.mktemp("cores")
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(small_model), config).save_pretrained(str(folder / "old"))
    lines = [json.dumps({"text": f"an old pear, number {i}, of {i % 7} in all"}) for i in range(30)]
    (folder / "old.jsonl").write_text("\n".join(lines))
    return folder


def asked(place, model, out, *more):
    return ["cores", str(model), str(place / "old"), str(place / "old.jsonl"), "--out", str(out), *more]


def test_a_table_with_a_line_a_layer_input(place, small_model, tmp_path, capsys):
    assert main(asked(place, small_model, tmp_path / "cores.safetensors", "--at-most", "5")) == 0
    shown = capsys.readouterr().out.replace(str(tmp_path), "DIR")
    assert_golden("cores.txt", re.sub(r"\d\d\.\d", "##.#", shown))


def test_measure_takes_the_file(place, small_model, tmp_path, capsys):
    file = tmp_path / "cores.safetensors"
    assert main(asked(place, small_model, file, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    cores = read_cores(file)
    assert set(said["tensors"]) == set(cores), "the tensor that holds the core of each layer"
    assert {layer: made["k"] for layer, made in said["layers"].items()} == {s: cores[s].k for s in said["layers"]}
    moved = {}
    for layer, f in read_adapter(place / "old").items():
        step = torch.randn(f.A.shape, dtype=torch.float64) * float(f.A.norm()) / 10
        moved[layer] = Factors((f.A.double() + cores[layer].outside(step)).float(), f.B, f.scale)
    write_adapter(tmp_path / "new", moved, base=str(small_model))
    assert main(["measure", str(place / "old"), str(tmp_path / "new"), "--cores", str(file)]) == 0
    assert "protected: rho is no more than rounding explains" in capsys.readouterr().out


def test_spread_says_how_many_examples_it_used(place, small_model, tmp_path, capsys):
    assert main(asked(place, small_model, tmp_path / "one", "--limit", "20", "--spread")) == 0
    assert "from 20 of 20 examples" in capsys.readouterr().out


def test_wrong_requests_are_one_line_and_write_nothing(place, small_model, tmp_path, capsys):
    (tmp_path / "there").write_text("kept")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    file = tmp_path / "cores"
    of_file = ["cores", str(small_model), str(place / "old")]
    wrong = [
        (asked(place, small_model, tmp_path / "there"), "there exists already and is not overwritten; give another name"),
        (asked(place, small_model, file, "--energy", "2"), "energy is a fraction"),
        (asked(place, small_model, file, "--rows", "0"), "Invalid value for '--rows'"),
        (asked(place, small_model, file, "--columns", "body"), "old.jsonl, line 1: no column 'body'; it has: text"),
        (asked(place, small_model, file, "--device", "nowhere"), "no device is called 'nowhere'"),
        (asked(place, tmp_path / "no/model", file), "no model at"),
        ([*of_file, str(tmp_path / "bad.jsonl"), "--out", str(file)], "bad.jsonl, line 2: text must be text, not a number"),
        (
            [*of_file, str(tmp_path / "chat.jsonl"), "--out", str(file)],
            "chat.jsonl, line 1: this is a chat, and the tokenizer has no chat template",
        ),
        (
            ["cores", str(small_model), str(tmp_path), str(place / "old.jsonl"), "--out", str(file)],
            "nor a saved adapter (adapter_config.json)",
        ),
    ]
    for words, said in wrong:
        assert main(words) == 2, words
        assert said in one_line(capsys)
    assert (tmp_path / "there").read_text() == "kept"
    assert not file.exists()
