"""A stranger's model folder, damaged or made to mislead: it is refused in one line, and nothing of it is guessed."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from anchorlora.cli.app import main
from said import one_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path, small_model):
    return shutil.copytree(small_model, tmp_path / "model")


@pytest.fixture
def command(model, small_benchmark):
    asked = ["--method", "sfor", "--model", str(model), "--data", str(small_benchmark), "--order", "fruit,mood"]
    return ["run", "standard-cl", *asked, "--set", "max_tokens=96"]


def config(**fields):
    def edit(model):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def holding(name, text):
    return lambda model: (model / name).write_text(text)


def cut(name, to):
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:to])


def tensors(change):
    def edit(model):
        held = load_file(model / WEIGHTS)
        change(held)
        save_file(held, model / WEIGHTS, metadata={"format": "pt"})

    return edit


def index(model, content, shard="model-1.safetensors"):
    (model / WEIGHTS).rename(model / shard)
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(model / shard), shard)} | content))


UNSIZED = {
    "a configuration that is a list": (holding("config.json", "[]"), "config.json: no object of fields"),
    "a kind of model that is a list": (config(model_type=[]), "TypeError"),
    "a kind of model that is unknown": (config(model_type="none"), "ValueError"),
    "a width that is a word": (config(hidden_size="x"), "field 'hidden_size': TypeError"),
    "a width below zero": (config(hidden_size=-1), "RuntimeError"),
    "no heads": (config(num_attention_heads=0), "ZeroDivisionError"),
    "an unknown kind of positions": (config(rope_parameters={"rope_type": "none"}), "KeyError: 'none'"),
    "an unknown activation": (config(hidden_act="none"), "KeyError: 'none'"),
    "an unknown type of numbers": (config(dtype="none"), "AttributeError"),
    "a quantisation that is a number": (config(quantization_config=5), "AttributeError"),
}
DAMAGES = UNSIZED | {
    "a vocabulary beyond all memory": (config(vocab_size=10**13), "RuntimeError"),
    "an empty tokenizer": (holding("tokenizer.json", "{}"), "KeyError: 'added_tokens'"),
    "a tokenizer that is cut": (cut("tokenizer.json", 500), "JSONDecodeError"),
    "settings of the tokenizer that are a list": (holding("tokenizer_config.json", "[]"), "tokenizer_config.json: no object of"),
    "a tokenizer's class that is a number": (holding("tokenizer_config.json", '{"tokenizer_class": 5}'), "AttributeError"),
    "an end of text that is a number": (holding("tokenizer_config.json", '{"eos_token": 5}'), "TypeError"),
    "weights that are cut": (cut(WEIGHTS, 5000), "SafetensorError"),
    "weights that are empty": (cut(WEIGHTS, 0), "SafetensorError"),
    "an index without metadata": (lambda model: index(model, {}), "KeyError: 'metadata'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_in_one_line(damage, model, command, tmp_path, capsys):
    damaged, message = DAMAGES[damage]
    damaged(model)
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = one_line(capsys)
    assert message in said
    assert str(model) in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", UNSIZED)
def test_a_dry_run_says_in_one_line_why_sizes_are_unknown(damage, model, command, capsys):
    UNSIZED[damage][0](model)
    assert main([*command, "--dry-run"]) == 0
    (line,) = capsys.readouterr().out.partition("optimizer steps in all\n")[2].splitlines()
    assert line.startswith("# sizes unknown: ")


def test_an_error_without_words_is_named_by_its_kind(model, command, tmp_path, capsys, monkeypatch):
    def silent(*args, **kwargs):
        raise RuntimeError

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", silent)
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert f"the model {model} cannot be loaded: RuntimeError\n" in one_line(capsys)
