"""A stranger's model folder, damaged or made to mislead: it is refused in one line, and nothing of it is guessed."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.errors import NotFinite
from anchorlora.models.load import load_base_model, load_weights, tokenizer_of
from golden import one_line

Q = "model.layers.0.self_attn.q_proj.weight"
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


def latin(name, text):
    return lambda model: (model / name).write_bytes(text.encode("latin-1"))


def cut(name, to):
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:to])


def tensors(change):
    def edit(model):
        held = load_file(model / WEIGHTS)
        change(held)
        save_file(held, model / WEIGHTS, metadata={"format": "pt"})

    return edit


def index(model, shard="model-1.safetensors", name=INDEX, **more):
    (model / WEIGHTS).rename(model / shard)
    (model / name).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(model / shard), shard)} | more))


UNSIZED = {
    "a configuration that is a list": (holding("config.json", "[]"), "config.json: not a JSON object"),
    "a kind of model that is a list": (config(model_type=[]), "TypeError"),
    "a kind of model that is unknown": (config(model_type="none"), "ValueError"),
    "a kind of model that writes no text": (config(model_type="vit"), "of type vit, and only causal language models are supported"),
    "a width that is a word": (config(hidden_size="x"), "field 'hidden_size': TypeError"),
    "a width below zero": (config(hidden_size=-1), "RuntimeError"),
    "no heads": (config(num_attention_heads=0), "ZeroDivisionError"),
    "an unknown kind of positions": (config(rope_parameters={"rope_type": "none"}), "KeyError: 'none'"),
    "an unknown activation": (config(hidden_act="none"), "KeyError: 'none'"),
    "an unknown type of numbers": (config(dtype="none"), "AttributeError"),
    "a quantization that is a number": (config(quantization_config=5), "AttributeError"),
}
DAMAGES = UNSIZED | {
    "a vocabulary beyond all memory": (config(vocab_size=10**13), "RuntimeError"),
    "an empty tokenizer": (holding("tokenizer.json", "{}"), "KeyError: 'added_tokens'"),
    "a tokenizer that is cut": (cut("tokenizer.json", 500), "JSONDecodeError"),
    "settings of the tokenizer that are a list": (
        holding("tokenizer_config.json", "[]"),
        "tokenizer_config.json: not a JSON object",
    ),
    "a tokenizer's class that is a number": (holding("tokenizer_config.json", '{"tokenizer_class": 5}'), "AttributeError"),
    "an end of text that is a number": (holding("tokenizer_config.json", '{"eos_token": 5}'), "TypeError"),
    "a tokenizer that is not UTF-8": (latin("tokenizer.json", '{"é": 1}'), "tokenizer.json is not UTF-8; save the file as UTF-8"),
    "a chat template that is not UTF-8": (latin("chat_template.jinja", "é"), "chat_template.jinja is not UTF-8; save the file"),
    "weights that are cut": (cut(WEIGHTS, 5000), "SafetensorError"),
    "weights that are empty": (cut(WEIGHTS, 0), "SafetensorError"),
    "an index without metadata": (lambda model: index(model), "KeyError: 'metadata'"),
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


def test_a_chat_template_by_name_is_refused_by_its_name(model, tmp_path):
    named = tmp_path / "turns.jinja"
    for write, message in (
        (lambda: None, f"there is no file {named} for the chat template"),
        (lambda: named.write_bytes(b"\xe9"), f"{named} is not UTF-8; save the file as UTF-8, or fetch it again"),
    ):
        write()
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            load_base_model(BaseModelSettings(model=str(model), chat_template=str(named), device="cpu"))


def test_a_byte_order_mark_is_no_part_of_a_chat_template(model, tmp_path):
    named = tmp_path / "turns.jinja"
    named.write_text("{{ messages }}", encoding="utf-8-sig")
    assert tokenizer_of(BaseModelSettings(model=str(model), chat_template=str(named))).chat_template == "{{ messages }}"


def test_an_error_without_words_is_named_by_its_kind(model, command, tmp_path, capsys, monkeypatch):
    def silent(*args, **kwargs):
        raise RuntimeError

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", silent)
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert f"the model {model} cannot be loaded: RuntimeError\n" in one_line(capsys)


WEIGHTS = "model.safetensors"
CUT = {"cut": lambda folder: os.truncate(folder / WEIGHTS, 5000), "missing": lambda folder: (folder / WEIGHTS).unlink()}


@pytest.mark.parametrize("load", [load_base_model, load_weights])
@pytest.mark.parametrize("how", CUT)
def test_weights_that_are_cut_or_missing_are_fetched_again(how, load, model):
    CUT[how](model)
    with pytest.raises(ValueError, match=f"^the model {model} cannot be loaded: [^\n]*; fetch the model again$"):
        load(BaseModelSettings(model=str(model), device="cpu"))


INCOMPLETE = {
    "one is missing": (lambda held: held.pop(Q), f"its files lack {Q}; fetch"),
    "two are missing": (lambda held: (held.pop(Q), held.pop("lm_head.weight")), r"lack lm_head.weight \(2 such tensors\); fetch"),
    "one has another name": (lambda held: held.update(x=held.pop(Q)), f"its files lack {Q}; fetch"),
    "one has another shape": (lambda held: held.update({Q: held[Q][1:].clone()}), f"its files hold another shape of {Q}; fetch"),
    "one is too many": (lambda held: held.update(x=held[Q].clone()), "its files hold x, which this kind of model has not; fetch"),
}


@pytest.mark.parametrize("load", [load_base_model, load_weights])
@pytest.mark.parametrize("how", INCOMPLETE)
def test_weights_that_are_not_all_of_the_models_tensors_are_refused(how, load, model):
    change, message = INCOMPLETE[how]
    tensors(change)(model)
    with pytest.raises(ValueError, match=f"^the model {model} cannot be loaded: .*{message} the model again$"):
        load(BaseModelSettings(model=str(model), device="cpu"))


def test_an_incomplete_model_is_refused_in_one_line(model, command, tmp_path, capfd):
    tensors(lambda held: held.pop(Q))(model)
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert f"its files lack {Q}" in one_line(capfd)
    assert not (tmp_path / "out").exists()


def test_a_tensor_whose_name_steers_a_terminal_is_named_in_words(model, command, tmp_path, capfd):
    tensors(lambda held: held.update({"x\x1b]0;owned\x07": held[Q].clone()}))(model)
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert r"its files hold x\u001b]0;owned\u0007, which" in one_line(capfd)


@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
def test_tied_weights_and_what_is_computed_anew_may_be_missing_and_may_be_there(kind, model):
    if kind:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config(tie_word_embeddings=True)(model)
    tensors(lambda held: held.pop("lm_head.weight"))(model)
    load_base_model(BaseModelSettings(model=str(model), device="cpu", quantized=kind))
    tensors(lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}))(model)
    tensors(lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))(model)
    load_base_model(BaseModelSettings(model=str(model), device="cpu", quantized=kind))


@pytest.mark.parametrize("load", [load_base_model, load_weights])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(value, load, model):
    tensors(lambda held: held[Q][3].fill_(value))(model)
    with pytest.raises(NotFinite, match=f"the model {model} holds NaN or infinite values in {Q}; fetch the model again"):
        load(BaseModelSettings(model=str(model), device="cpu"))


def test_scales_of_quantized_weights_that_are_no_numbers_are_refused_by_name(model, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    quantized = load_base_model(BaseModelSettings(model=str(model), device="cpu", quantized="nf4"))
    for part in (quantized.model, quantized.tokenizer):
        part.save_pretrained(tmp_path / "nf4")
    load_base_model(BaseModelSettings(model=str(tmp_path / "nf4"), device="cpu"))
    tensors(lambda held: held[f"{Q}.absmax"][3].fill_(float("nan")))(tmp_path / "nf4")
    with pytest.raises(NotFinite, match=f"holds NaN or infinite values in {Q}.absmax"):
        load_base_model(BaseModelSettings(model=str(tmp_path / "nf4"), device="cpu"))


def other_index(model, shard):
    index(model, shard, "other.safetensors.index.json", metadata={})
    config(transformers_weights="other.safetensors.index.json")(model)


def named(name):
    def edit(model):
        (model / "sub").mkdir()
        (model / WEIGHTS).rename(model / name)
        config(transformers_weights=name)(model)

    return edit


ELSEWHERE = {
    "an index outside": lambda model: index(model, "../x.safetensors", metadata={}),
    "an index below": lambda model: ((model / "sub").mkdir(), index(model, "sub/x.safetensors", metadata={})),
    "an index of another name": lambda model: other_index(model, "../x.safetensors"),
    "a file below": named("sub/x.safetensors"),
    "a file outside": named("../x.safetensors"),
    "a name that is a number": config(transformers_weights=5),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_weights_that_do_not_lie_beside_their_configuration_are_refused(where, model):
    """Their hashes would not stand in the record."""
    ELSEWHERE[where](model)
    with pytest.raises(ValueError, match="which is not a safetensors file next to it"):
        load_base_model(BaseModelSettings(model=str(model), device="cpu"))


def test_shards_beside_their_index_are_read_and_an_index_that_nothing_reads_is_no_matter(model, tmp_path):
    beside = shutil.copytree(model, tmp_path / "beside")
    other_index(beside, "x.safetensors")
    load_base_model(BaseModelSettings(model=str(beside), device="cpu"))
    (model / INDEX).write_text("{}")
    load_base_model(BaseModelSettings(model=str(model), device="cpu"))


ADAPTER = "holds an adapter (adapter_config.json), which would change its weights; merge the adapter into them, or move its files"


@pytest.mark.parametrize("fields", [{}, {"target_modules": "([a-z0-9_.]+)+!", "peft_type": "LORA"}])
@pytest.mark.parametrize("commit", [None, "0" * 40])
def test_a_model_that_brings_an_adapter_is_refused_before_it_is_read(commit, fields, model):
    (model / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=re.escape(f"the model {model} {ADAPTER}")):
        load_base_model(BaseModelSettings(model=str(model), device="cpu", trust_remote_code=commit))


def test_a_model_of_the_hub_that_brings_an_adapter_is_refused(small_model, tmp_path, monkeypatch):
    cache, commit = tmp_path / "hub/models--org--m", "0" * 40
    place = shutil.copytree(small_model, cache / "snapshots" / commit)
    (place / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/another"}))
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ValueError, match=re.escape(f"the model org/m {ADAPTER}")):
        load_base_model(BaseModelSettings(model="org/m", device="cpu"))
