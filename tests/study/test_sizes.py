"""What a dry run says: sizes from configurations alone, expected time beside what torch counts, one quick question to the hub."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import small
from anchorlora.adapters import AdapterStack
from anchorlora.cli import dry_run
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings, RunConfig
from anchorlora.data import Benchmark, Encoder
from anchorlora.models.hub import PATIENCE, cached_folder
from anchorlora.models.load import tokenizer_of
from anchorlora.recipes import long_sequence, mini, mistral_7b, qwen3_8b
from anchorlora.runs import sizes as module
from anchorlora.runs.expected import SplitSize, measured_rate, parts_of, work_of
from anchorlora.runs.sizes import sizes
from study.fake_steps import traced

# the published configurations of the two base models, as far as shapes go
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}


def folder(root, config):
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    return str(root)


@pytest.mark.parametrize(
    ("recipe", "config", "parameters", "block", "layers"),
    [
        (qwen3_8b, QWEN3_8B, 8_190_735_360, 3_833_856, 72),
        (mistral_7b, MISTRAL_7B, 7_248_023_552, 3_407_872, 64),
    ],
)
def test_the_studys_backbones_have_their_known_sizes(recipe, config, parameters, block, layers, tmp_path):
    found = sizes(recipe().changed({"model": folder(tmp_path / "m", config)}), tasks=4, cumulative=True)
    assert (found.parameters, found.block, found.layers, found.dtype) == (parameters, block, layers, "bfloat16")
    assert found.memory["base_model"] == 2 * parameters
    assert found.memory["blocks"] == 4 * block * (4 + 3)  # value, gradient, two moments; three frozen blocks
    assert found.memory["base_model"] < found.peak < 80 * 2**30
    width = config["num_hidden_layers"] * config["hidden_size"]
    assert found.host == 4 * 4 * (128 + 32) * width
    many, more = (sizes(recipe().changed({"model": str(tmp_path / "m")}), tasks=n, cumulative=False).host for n in (256, 1000))
    assert many == more == 4 * (2048 + 2 * 4096) * width


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "xlstm"])
def test_models_without_attention_heads_have_sizes(kind, tmp_path):
    config = {"model_type": kind, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64}
    found = sizes(mini().changed({"model": folder(tmp_path / "m", config), "targets": "all-linear"}), tasks=2, cumulative=False)
    assert found.parameters < found.memory["base_model"] < found.peak
    assert found.layers >= 2


def test_a_shared_adapter_stores_no_earlier_blocks(tmp_path):
    recipe = qwen3_8b().changed({"model": folder(tmp_path / "m", QWEN3_8B)})
    found = sizes(recipe, tasks=4, cumulative=False)
    assert found.memory["blocks"] == 4 * found.block * 4


@pytest.mark.parametrize("hidden", [128, 320])
def test_activations_are_estimated_within_a_factor_of_what_autograd_keeps(hidden, tmp_path):
    config = {**QWEN3_8B, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 3, "vocab_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    settings = {"model": folder(tmp_path / "m", config), "dtype": "float32", "micro_batch": 2, "max_tokens": 96}
    estimate = sizes(qwen3_8b().changed(settings), tasks=1, cumulative=False).memory["activations"]
    blocks = AdapterStack(Qwen3ForCausalLM(Qwen3Config(**config)), targets=("q_proj", "v_proj"), rank=8, alpha=32, dropout=0.1)
    blocks.open(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in blocks.trainable():
            p.add_(0.1)
    weights, kept = {p.untyped_storage().data_ptr() for p in blocks.model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    blocks.model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ids = torch.randint(0, 64, (2, 96))
        outputs = blocks.model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=4, use_cache=False)
    assert outputs.logits.requires_grad
    assert 1 / 2 < estimate / sum(kept.values()) < 2


TWO = {"num_hidden_layers": 2}
SMALL = {"hidden_size": 320, "intermediate_size": 960, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80} | TWO
TRACED = {
    "qwen3, one example": (QWEN3_8B | TWO, {"micro_batch": 1, "max_tokens": 512, "eval_batch": 16}),
    "qwen3, eight examples": (QWEN3_8B | TWO, {"micro_batch": 8, "max_tokens": 256, "eval_batch": 64}),
    "qwen3, one long example": (QWEN3_8B | TWO, {"micro_batch": 1, "max_tokens": 2048, "eval_batch": 4}),
    "qwen3, float32": (QWEN3_8B | TWO, {"micro_batch": 4, "max_tokens": 512, "eval_batch": 16, "dtype": "float32"}),
    "qwen3, every linear layer": (
        QWEN3_8B | TWO,
        {"micro_batch": 4, "max_tokens": 512, "targets": "all-linear", "eval_batch": 16},
    ),
    "mistral": (MISTRAL_7B | TWO, {"micro_batch": 4, "max_tokens": 512, "eval_batch": 64}),
    "a small one": (QWEN3_8B | SMALL | {"vocab_size": 512}, {"micro_batch": 4, "max_tokens": 512, "eval_batch": 32}),
    "no dropout": (QWEN3_8B | TWO, {"micro_batch": 4, "max_tokens": 512, "dropout": 0, "eval_batch": 16}),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", TRACED)
def test_memory_is_estimated_within_a_fifth_of_a_traced_step_of_the_real_model(name, tmp_path):
    """Parameters are known exactly, so only what comes beside them is compared."""
    config, settings = TRACED[name]
    recipe = qwen3_8b().changed({"model": folder(tmp_path / "m", config), "device": "cpu"} | settings)
    found = sizes(recipe, tasks=1, cumulative=False).memory
    training, evaluating = traced(recipe)
    beside = found["base_model"] + found["blocks"]
    assert 0.8 < found["activations"] / (training - beside) < 1.25
    assert 0.8 < found["evaluation"] / (evaluating - beside) < 1.25


def test_activations_are_computed_again_only_on_an_accelerator_whose_memory_may_not_hold_them(tmp_path, monkeypatch):
    recipe, left = qwen3_8b().changed({"model": folder(tmp_path / "m", QWEN3_8B)}), {}
    monkeypatch.setattr(module, "free_memory", lambda device: left["bytes"])
    estimate = sizes(recipe, tasks=1, cumulative=False)
    needed = estimate.peak - estimate.memory["base_model"]

    def again(device, free):
        left["bytes"] = free
        return module.needs_checkpointing(recipe, torch.device(device))

    assert [again("cuda", free) for free in (None, needed, 2 * needed - 2, 2 * needed + 2)] == [True, True, True, False]
    assert not any(again("cpu", free) for free in (None, 1))
    (tmp_path / "m/config.json").unlink()
    assert again("cuda", 2 * needed + 2), "there is no estimate"


def test_a_dry_run_says_steps_parameters_and_memory_and_loads_no_weights(capsys, tmp_path, monkeypatch):
    import anchorlora.models.load

    monkeypatch.setattr(anchorlora.models.load, "load_base_model", lambda *a, **k: pytest.fail("weights were loaded"))
    assert main(["run", "mini", "--method", "o-lora-hard", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "# 320 optimizer steps in all" in said
    assert "# 2,410,560 parameters of the base model (float32); 21,504 in a block at 8 layers" in said
    assert main(["run", "qwen3-8b", "--model", folder(tmp_path / "m", QWEN3_8B), "--method", "sfor", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "# no data folder yet" in said
    assert "8,190,735,360 parameters of the base model (bfloat16)" in said


def test_a_model_without_a_configuration_leaves_sizes_unknown_and_says_so(capsys, tmp_path):
    assert main(["run", "qwen3-8b", "--model", str(tmp_path / "nothing"), "--method", "sfor", "--dry-run"]) == 0
    assert "# sizes unknown: no model at " in capsys.readouterr().out


def test_the_studys_recipes_differ_from_the_standard_one_in_backbone_and_precision_alone():
    from anchorlora.config import differences
    from anchorlora.recipes import standard_cl

    def changes(recipe):
        configs = [RunConfig(method="sfor", order=("a",), seed=1, recipe=r) for r in (standard_cl(), recipe)]
        return {line.split(":")[0] for line in differences(*configs)}

    assert changes(qwen3_8b()) == changes(mistral_7b()) == {"recipe.name", "recipe.base_model.model", "recipe.base_model.dtype"}
    assert changes(long_sequence()) == {"recipe.name", "recipe.tasks.orders"}
    assert len(long_sequence().tasks.orders["order1"]) == 15
    assert mini().trace.trace_points is None


WIDE = {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 4, "vocab_size": 3000}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80}
TOKENS, ANSWER = 96, 5
CPU = torch.device("cpu")


def operations(call):
    with FlopCounterMode(display=False) as counted:
        call()
    return counted.get_total_flops()


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts_in_a_step_of_the_model(tied, tmp_path):
    """Within a tenth: attention scores are not counted, nor gradients below the first adapter."""
    config = {**QWEN3_8B, **WIDE, "tie_word_embeddings": tied}
    recipe = qwen3_8b().changed({"model": folder(tmp_path / "m", config), "dtype": "float32"})
    found = sizes(recipe, tasks=1, cumulative=False)
    work = work_of(recipe, [(SplitSize(1, TOKENS, ANSWER), SplitSize(1, TOKENS, ANSWER))], found)
    stack = AdapterStack(Qwen3ForCausalLM(Qwen3Config(**config)), targets=("q_proj", "v_proj"), rank=8, alpha=32)
    stack.open(torch.Generator().manual_seed(0))
    ids = torch.zeros(1, TOKENS, dtype=torch.long)

    def forward():
        return stack.model(input_ids=ids, logits_to_keep=ANSWER, use_cache=False).logits.sum()

    assert 0.9 < work.training / operations(lambda: forward().backward()) < 1.1
    with torch.no_grad():
        assert 0.9 < work.evaluation / operations(forward) < 1.1


def test_a_task_is_trained_once_an_epoch_and_tested_after_every_task_from_its_own_on(tmp_path):
    recipe = mini().changed({"epochs": 3})
    found = sizes(qwen3_8b().changed({"model": folder(tmp_path / "m", QWEN3_8B | WIDE)}), tasks=1, cumulative=False)
    one = work_of(mini().changed({"epochs": 1}), [(SplitSize(10, 20, 2), SplitSize(5, 20, 2))], found)
    three = work_of(recipe, [(SplitSize(10, 20, 2), SplitSize(5, 20, 2))] * 3, found)
    assert three.training == 9 * one.training
    assert three.evaluation == 6 * one.evaluation


def test_tokens_are_those_of_the_data_and_without_a_tokenizer_the_most_there_may_be(small_benchmark, small_model):
    recipe, source = small.recipe(small_benchmark, small_model), Benchmark(small_benchmark)
    encoder = Encoder(tokenizer_of(recipe.base_model), max_tokens=96)
    encoded = encoder.encode(source.task("mood"), source.examples("mood", "train"))
    train, test = parts_of(recipe, source, encoder, "mood")
    assert train == SplitSize(24, sum(len(e.prompt + e.answer) for e in encoded) / 24, sum(len(e.answer) for e in encoded) / 24)
    assert test.examples == 6
    assert parts_of(recipe, source, None, "mood") == (SplitSize(24, 96, 1), SplitSize(6, 96, 1))
    without = RunConfig(method="sfor", order=("mood",), seed=1, recipe=recipe.changed({"data": "none", "test_limit": 8}))
    unknown = [f"expected time unknown: {dry_run.NO_DATA}"]
    assert dry_run.estimate_time([without], None) == unknown, "nobody knows how many examples there are"


def test_a_holdout_run_is_expected_without_opening_a_test_file(small_benchmark, small_model):
    recipe = small.recipe(small_benchmark, small_model, tested_on="holdout")
    train, test = parts_of(recipe, Benchmark(small_benchmark).training_only(), None, "mood")
    assert train.examples + test.examples == 24
    assert test.examples


def test_a_device_that_is_not_there_is_not_measured():
    with pytest.raises(ValueError, match=r"the device meta:7 cannot be measured here: .* state its rate with --flops"):
        measured_rate(torch.device("meta", 7), torch.float32, (8, 8), rows=8)


def comments(capsys):
    """What a dry run says, as it was before it was broken into lines."""
    return capsys.readouterr().out.replace("\n#", "")


def test_a_dry_run_says_the_time_at_a_stated_rate(capsys):
    assert main(["run", "mini", "--method", "sfor", "--dry-run", "--flops", "1e9"]) == 0
    said = comments(capsys)
    training, evaluation = map(float, re.search(r"about ([\d.e+]+) FLOP of training and ([\d.e+]+) of evaluation", said).groups())
    minutes = int(re.search(r" at least (\d+) min at 0.001 TFLOP/s \(stated\)$", said.rstrip())[1])
    assert minutes * 60e9 == pytest.approx(training + evaluation, rel=0.05)


@pytest.mark.parametrize("rate", ["0", "-1", "inf", "nan", "fast"])
def test_a_rate_that_is_none_is_refused_in_one_line(rate, capsys):
    assert main(["run", "mini", "--method", "sfor", "--dry-run", "--flops", rate]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "'--flops'" in said.err
    assert said.err.count("\n") == 1


def test_without_a_stated_rate_it_is_measured(capsys):
    assert main(["run", "mini", "--method", "sfor", "--dry-run"]) == 0
    assert re.search(r"TFLOP/s \(measured on cpu by a product in float32; state another with --flops\)", comments(capsys))


def test_a_dry_grid_adds_up_its_missing_runs(capsys, tmp_path):
    words = ["grid", "mini", "--methods", "sfor", "--out", str(tmp_path / "g"), "--dry-run", "--flops", "1e9", "--slots", "2"]
    hours = []
    for seeds in ("1", "1,2,3"):
        assert main([*words, "--orders", "order1", "--seeds", seeds]) == 0
        found = re.search(
            r"at least ([\d.]+) device-hours at 0.001 TFLOP/s \(stated\), so .* with 2 at a time", capsys.readouterr().out
        )
        hours.append(float(found[1]))
    assert hours[1] == pytest.approx(3 * hours[0], rel=0.1)
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["standard-cl", "--set", "train_limit=none"], "no model yet; give one with --model"),
        (["qwen3-8b", "--model", "MODEL"], "no data folder yet; give one with --data"),
        (["mini", "--set", "device=cuda:9"], "cannot be measured here: "),
    ],
)
def test_a_time_that_is_unknown_is_said_to_be(words, why, small_model, tmp_path, capsys):
    words = [str(small_model) if word == "MODEL" else word for word in words]
    assert main(["grid", *words, "--methods", "sfor", "--seeds", "1", "--out", str(tmp_path / "g"), "--dry-run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("expected time unknown: ")
    assert why in last


NAME = "some-org/some-model"
DRY = ["run", "qwen3-8b", "--model", NAME, "--method", "sfor", "--dry-run"]
SETTINGS = BaseModelSettings(model=NAME)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answering(monkeypatch, how):
    asked = []

    def answer(url, **settings):
        asked.append(url)
        return how()

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    return asked


def refusing(kind, status):
    def refuse():
        error = kind.__new__(kind)  # what it is made of differs between versions
        error.response = SimpleNamespace(status_code=status)
        raise error

    return refuse


def test_without_a_network_one_line_says_so_with_status_2_after_one_attempt(monkeypatch, capsys):
    def unreachable():
        raise OSError("[Errno -2] Name or service not known")

    asked = answering(monkeypatch, unreachable)
    assert main(DRY) == 2
    said = capsys.readouterr()
    assert said.err == (
        f"error: the configuration of the model {NAME} is not in the local cache, and the hub does not answer: [Errno -2] Name or "
        f"service not known; give a folder with --model, or fetch the model where there is a network (hf download {NAME})\n"
    )
    assert f"model: {NAME}" in said.out
    assert "sizes unknown" not in said.out
    assert len(asked) == 1


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch):
    answering(monkeypatch, lambda: time.sleep(10))
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"does not answer: nothing within {PATIENCE} seconds"):
        cached_folder(SETTINGS)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(("kind", "status"), [(RepositoryNotFoundError, 404), (HfHubHTTPError, 403)])
def test_a_hub_that_refuses_is_there_and_reading_says_what_is_wrong(kind, status, monkeypatch):
    answering(monkeypatch, refusing(kind, status))
    assert cached_folder(SETTINGS) is None


def test_a_hub_that_is_broken_is_not_there(monkeypatch):
    answering(monkeypatch, refusing(HfHubHTTPError, 503))
    with pytest.raises(ValueError, match="does not answer: status 503"):
        cached_folder(SETTINGS)


def test_a_cached_configuration_is_enough_and_nobody_is_asked(monkeypatch, cache, small_model, capsys):
    asked = answering(monkeypatch, lambda: pytest.fail("the hub was asked"))
    commit, place = "0" * 40, cache / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(small_model, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(commit)
    assert cached_folder(SETTINGS) == place / "snapshots" / commit
    assert main(DRY) == 0
    assert "parameters of the base model" in capsys.readouterr().out
    assert not asked


@pytest.mark.parametrize("name", ["./model", "a/b/c", "not a name"])
def test_what_is_no_name_on_the_hub_is_not_asked_for(name, monkeypatch):
    answering(monkeypatch, lambda: pytest.fail("the hub was asked"))
    assert cached_folder(BaseModelSettings(model=name)) is None


def test_the_estimate_of_many_runs_reads_their_model_once(monkeypatch):
    read, real = [], dry_run._Model
    monkeypatch.setattr(dry_run, "_Model", lambda recipe, folder: read.append(recipe) or real(recipe, folder))
    runs = [RunConfig(method="sfor", order=("reviews", "news"), seed=seed, recipe=mini()) for seed in range(4)]
    lines = dry_run.estimate_time(runs, 2, 1e12)
    assert len(read) == 1
    assert lines[1].endswith("with 2 at a time")
