"""Adapters that PEFT saved with whole weights beside their factors: every command takes them, and carries them on as they are."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import models
import small
from anchorlora import METHODS, Subspace, run_sequence
from anchorlora.adapters import AdapterStack, read_adapter
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.continual.callback import RunCallback
from anchorlora.errors import Interrupted, InvalidValue
from anchorlora.features import write_cores
from anchorlora.models.session import Session
from architectures.cases import SEES
from skills import FEW, rows, written

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:Model with `tie_word_embeddings=True`")
EPS = torch.finfo(torch.float32).eps
WHOLE = {
    "a head": {"modules_to_save": ["lm_head"]},
    "norms and an embedding": {"modules_to_save": ["norm", "embed_tokens"]},  # PEFT takes every module whose path ends so
    "new rows": {"trainable_token_indices": {"embed_tokens": [60, 61]}},
}


@pytest.fixture(scope="module", params=["Qwen3", "Llama, tied"])
def base(request, small_model, tmp_path_factory):
    """Folder of a small model: head and embedding apart, or tied."""
    if request.param == "Qwen3":
        return small_model
    tokenizer, folder = AutoTokenizer.from_pretrained(small_model), tmp_path_factory.mktemp("llama") / "tiny"
    torch.manual_seed(12)
    model = models.llama(vocab=len(tokenizer))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def opened(folder, adapter=None):
    """A model as transformers and PEFT open it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()


def moved(folder, to, options, seed=4):
    """An adapter with whole weights, as PEFT alone makes and saves it; all that trains has moved."""
    torch.manual_seed(seed)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = get_peft_model(opened(folder), LoraConfig(**settings | options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "lora" not in name:
                p.add_(0.1 * torch.randn(p.shape))
    model.save_pretrained(str(to), save_embedding_layers=False)
    return to


@pytest.fixture(params=WHOLE.values(), ids=WHOLE)
def old(request, base, tmp_path):
    return moved(base, tmp_path / "old", request.param)


@torch.no_grad()
def logits(model):
    return model(input_ids=models.tokens(vocab=200)).logits


def close(a, b):
    return float((a - b).abs().max()) <= 200 * EPS * float(b.abs().max())


def whole(adapter):
    """The whole weights in a file, by name."""
    return {name: tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items() if ".lora_" not in name}


def same_whole(one, other):
    theirs = whole(other)
    return theirs.keys() == whole(one).keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in whole(one).items())


def said(capsys):
    return capsys.readouterr().out


def test_an_export_is_the_adapter_with_its_weights_or_what_peft_merges(base, old, tmp_path, capsys):
    expected = opened(base, old)
    for form in ("cat", "svd", "merged"):
        words = ["export", str(old), "--form", form, "--model", str(base), "--out", str(tmp_path / form)]
        assert main([*words, *(["--rank", "3"] if form == "svd" else [])]) == 0
        text = said(capsys)
        assert "whole weights come with it, as they were: " in text
        assert ("vLLM and llama.cpp take no whole weights beside an adapter" in text) is (form != "merged")
        assert ("vLLM takes no whole weights" in (tmp_path / form / "README.md").read_text()) is (form != "merged")
        assert json.loads((tmp_path / form / "export.json").read_text())["whole"]
    assert close(logits(opened(base, tmp_path / "cat")), logits(expected))
    assert same_whole(old, tmp_path / "cat")
    assert same_whole(old, tmp_path / "svd")
    merged, live = opened(tmp_path / "merged"), logits(expected)
    assert close(logits(merged), live)
    by_peft = expected.merge_and_unload()
    assert close(logits(merged), logits(by_peft))
    for name in ("model.norm", "model.embed_tokens", "lm_head"):
        assert torch.equal(merged.get_submodule(name).weight, by_peft.get_submodule(name).weight), name


def test_the_scale_of_one_change_is_not_asked_of_its_factors_alone(base, old, tmp_path, capsys):
    assert main(["export", str(old), "--model", str(base), "--scale", "0.5", "--out", str(tmp_path / "half")]) == 2
    assert "is one change with its whole weights" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()


def test_two_adapters_are_compared_and_whole_weights_that_differ_are_named(base, old, tmp_path, capsys):
    cores = {name: Subspace(torch.linalg.qr(torch.randn(64, 4)).Q) for name in read_adapter(old, beside={})}
    write_cores(tmp_path / "cores.safetensors", cores)
    stack = AdapterStack.continuing(opened(base), old, rank=3)
    stack.save(tmp_path / "same", base=str(base))
    other = shutil.copytree(tmp_path / "same", tmp_path / "other")
    tensors = load_file(other / "adapter_model.safetensors")
    name = sorted(whole(other))[-1]
    tensors[name] += 1
    save_file(tensors, other / "adapter_model.safetensors")
    for after, differs in ((tmp_path / "same", False), (other, True)):
        named = ["--cores", str(tmp_path / "cores.safetensors")]
        assert main(["measure", str(old), str(after), *named]) == 0
        assert ("not protected at all, whole weights that differ: " in said(capsys)) is differs
        assert main(["measure", str(old), str(after), *named, "--json"]) == 0
        assert bool(json.loads(said(capsys))["unprotected"]) is differs
        assert main(["audit", str(old), str(after), *named]) == 0
        assert ("whole weights beside the factors differ, and nothing says what they keep: " in said(capsys)) is differs


def test_a_head_with_a_core_in_the_file_is_measured_like_a_layer(base, tmp_path, capsys):
    """Dense, float64: half of the change of the head lies on its core, by construction."""
    old, new = moved(base, tmp_path / "old", WHOLE["a head"]), tmp_path / "new"
    core = Subspace(torch.linalg.qr(torch.randn(64, 4)).Q)
    cores = {name: Subspace(torch.linalg.qr(torch.randn(64, 4)).Q) for name in read_adapter(old, beside={})} | {"lm_head": core}
    write_cores(tmp_path / "cores.safetensors", cores)
    tensors = load_file(shutil.copytree(old, new) / "adapter_model.safetensors")
    (name,) = whole(old)
    off = core.outside(torch.randn(1, 64))
    tensors[name][3] += (off / off.norm())[0] + core.basis[:, 0]
    save_file(tensors, new / "adapter_model.safetensors")
    dW = tensors[name].double() - whole(old)[name].double()
    expected = float((dW @ core.basis.double()).norm() / dW.norm())
    assert expected == pytest.approx(0.5**0.5, rel=1e-4)
    named = ["--cores", str(tmp_path / "cores.safetensors"), "--json"]
    assert main(["measure", str(old), str(new), *named]) == 0
    found = json.loads(said(capsys))
    assert found["unprotected"] == []
    assert found["layers"]["lm_head"]["rho"] == pytest.approx(expected, rel=1e-9)
    assert main(["audit", str(old), str(new), *named]) == 0
    found = json.loads(said(capsys))
    assert found["layers"]["lm_head"]["rho"] == pytest.approx(expected, rel=1e-9)
    assert found["layers"]["lm_head"]["status"] == "violated"
    save_file({**tensors, name: tensors[name].bfloat16()}, new / "adapter_model.safetensors")
    assert main(["audit", str(old), str(new), *named]) == 0
    assert json.loads(said(capsys))["storage"] == "bfloat16"
    save_file({**tensors, name: torch.cat([tensors[name], tensors[name][:3]])}, new / "adapter_model.safetensors")
    for command in ("measure", "audit"):
        assert main([command, str(old), str(new), *named]) == 2
        assert "so no core measures its change; leave it out of the cores" in capsys.readouterr().err


@pytest.mark.drawn(3)
@pytest.mark.parametrize("way", [[], ["--same-size"]], ids=["a new block", "the same size"])
def test_train_goes_on_from_one_and_says_that_its_weights_did_not_train(way, base, old, tmp_path, capsys):
    text = {name: written(tmp_path / f"{name}.jsonl", rows(name, "train", 40)) for name in ("news", "reviews")}
    words = ["train", str(base), "--data", text["news"], "--keep", text["reviews"], "--adapter", str(old), "--compare"]
    assert main([*words, "--out", str(tmp_path / "out"), *way, *FEW]) == 0
    assert "whole weights: " in said(capsys)
    made = tmp_path / "out/adapter"
    assert same_whole(old, made)
    assert json.loads((tmp_path / "out/skill/verdict.json").read_text())["protection"]["exact"]
    session = Session(BaseModelSettings(model=str(base), dtype="float32", device="cpu"))
    assert close(logits(session.adapted(made)), logits(opened(base, made)))
    assert main(["export", str(tmp_path / "out"), "--scale", "0.5", "--out", str(tmp_path / "half")]) == 0
    then, now, half = (
        {name: f.scale * f.B.double() @ f.A.double() for name, f in read_adapter(folder, beside={}).items()}
        for folder in (old, made, tmp_path / "half")
    )
    for name, goal in now.items():
        assert float((half[name] - (then[name] + goal) / 2).norm()) <= 1e-6 * float(goal.norm())
    assert same_whole(old, tmp_path / "half")
    shutil.rmtree(old)
    assert main(["export", str(tmp_path / "out"), "--scale", "0.5", "--out", str(tmp_path / "again")]) == 2
    assert "the adapter before it" in capsys.readouterr().err


@pytest.mark.drawn(2)
def test_a_run_goes_on_from_one_over_several_tasks_and_resumes(base, old, small_benchmark, tmp_path):
    recipe = small.recipe(small_benchmark, base).changed({"old_adapter": str(old)})
    for out in ("run", "stopped"):
        if out == "stopped":
            stop_after_one(recipe, tmp_path / out)
        run_sequence(recipe, METHODS["inc-lora"], order=["mood", "metal"], seed=2, out=tmp_path / out)
    one, other = (tmp_path / out / "tasks/2-metal/adapter/adapter_model.safetensors" for out in ("run", "stopped"))
    assert one.read_bytes() == other.read_bytes()
    assert same_whole(old, one.parent)


def stop_after_one(recipe, out):
    """The same run, stopped between its tasks."""

    class Stops(RunCallback):
        def on_task_begin(self, number, task, steps, done):
            if number == 2:
                raise Interrupted("enough")

    with pytest.raises(Interrupted):
        run_sequence(recipe, METHODS["inc-lora"], order=["mood", "metal"], seed=2, out=out, callbacks=[Stops()])


def vision(adapter):
    """The factors of the part that sees, by layer."""
    return {name: f for name, f in read_adapter(adapter, beside={}).items() if "vision" in name}


def test_factors_of_a_part_that_reads_no_text_are_carried_on_as_they_are(small_benchmark, tmp_path, capsys):
    """As of `target_modules=["q_proj", "v_proj"]` on a model that sees, whose vision tower PEFT adapts too."""
    base = SEES.write(tmp_path / "sees")
    old = moved(base, tmp_path / "old", {})
    recipe = small.recipe(small_benchmark, base).changed({"old_adapter": str(old)})
    for out in ("run", "stopped"):
        if out == "stopped":
            stop_after_one(recipe, tmp_path / out)
        run_sequence(recipe, METHODS["inc-lora"], order=["mood", "metal"], seed=2, out=tmp_path / out)
    first, made, other = (tmp_path / at / "adapter" for at in ("run/tasks/1-mood", "run/tasks/2-metal", "stopped/tasks/2-metal"))
    assert (made / "adapter_model.safetensors").read_bytes() == (other / "adapter_model.safetensors").read_bytes()
    assert len(vision(made)) == 2
    for name, f in vision(made).items():
        assert torch.equal(f.A, vision(old)[name].A)
        assert torch.equal(f.B, vision(old)[name].B)
    session = Session(BaseModelSettings(model=str(base), dtype="float32", device="cpu"))
    assert close(logits(session.adapted(made)), logits(opened(base, made)))
    cores = str(first.parent / "cores.safetensors")
    for command in ("measure", "audit"):
        assert main([command, str(first), str(made), "--cores", cores, "--json"]) == 0
        assert json.loads(said(capsys))["layers"]
    assert main(["export", str(tmp_path / "run"), "--form", "merged", "--out", str(tmp_path / "merged")]) == 0
    merged, by_peft = opened(tmp_path / "merged"), opened(base, made).merge_and_unload()
    for name in vision(made):
        assert close(merged.get_submodule(name).weight.detach(), by_peft.get_submodule(name).weight.detach())


def test_an_adapter_of_layers_that_read_no_text_alone_is_refused_with_what_to_do(tmp_path):
    base = SEES.write(tmp_path / "sees")
    old = moved(base, tmp_path / "old", {"target_modules": r".*vision.*\.q_proj"})
    session = Session(BaseModelSettings(model=str(base), dtype="float32", device="cpu"))
    with pytest.raises(InvalidValue, match="adapts no layer that reads text.*; merge it into its base with PEFT"):
        session.adapted(old)
