"""Expected time: operations beside those that torch counts in a real step, tokens of the real data, and what a dry run says."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import small
from anchorlora.adapters import AdapterStack
from anchorlora.cli.app import main
from anchorlora.data import Benchmark, Encoder
from anchorlora.models.load import tokenizer_of
from anchorlora.recipes import mini, qwen3_8b
from anchorlora.runs.expected import SplitSize, measured_rate, parts_of, work_of
from anchorlora.runs.sizes import sizes
from study.test_sizes import QWEN3_8B, folder

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
    assert parts_of(recipe, None, encoder, "mood") is None, "nobody knows how many examples there are"


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
