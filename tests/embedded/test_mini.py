"""The embedded benchmark: made by the programs in tools/mini, small, hard enough, and without contradiction."""

import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import saved
from anchorlora import METHODS, embedded, run_sequence
from anchorlora.data import Benchmark, Encoder
from anchorlora.data.importing import agrees, verify_benchmark
from anchorlora.recipes import mini

ROOT = Path(__file__).parents[2]
DATA, BACKBONE = embedded.folder("embedded:mini", "data"), embedded.folder("embedded:mini", "base_model")
TASKS = mini().tasks.orders["order1"]


def test_the_generator_makes_the_committed_files_byte_for_byte(tmp_path):
    subprocess.run([sys.executable, ROOT / "tools/mini/make_data.py", tmp_path / "data"], check=True)
    for path in DATA.rglob("*"):
        if path.is_file():
            assert (tmp_path / "data" / path.relative_to(DATA)).read_bytes() == path.read_bytes(), path
    assert all(map(agrees, verify_benchmark(DATA).values()))


def test_everything_embedded_takes_less_than_twelve_megabytes():
    assert sum(p.stat().st_size for p in DATA.parent.rglob("*") if p.is_file()) < 12e6


def test_nothing_embedded_needs_code_or_pickle():
    assert {p.suffix for p in DATA.parent.rglob("*") if p.is_file()} <= {".json", ".safetensors", ".md"}
    assert "auto_map" not in json.loads((BACKBONE / "config.json").read_text())


def test_an_input_has_one_right_answer_whatever_was_learned_last():
    """A prompt names its task, so no text has two labels; and no test text stands in any training file."""
    source, answers = Benchmark(DATA), {}
    for name in TASKS:
        task = source.task(name)
        for split in ("train", "test"):
            for e in source.examples(name, split):
                assert answers.setdefault(task.prompt(e.sentence), (e.label, split)) == (e.label, split)
    assert len(answers) == 4 * (640 + 160)


def test_labels_are_balanced_and_chance_is_low():
    source = Benchmark(DATA)
    for name in TASKS:
        counts = Counter(e.label for e in source.examples(name, "test"))
        labels = source.task(name).labels
        assert set(counts) == set(labels)
        assert max(counts.values()) < 2 * 160 / len(labels)


def test_every_label_is_one_token_and_no_passage_is_cut():
    tokenizer, source = AutoTokenizer.from_pretrained(BACKBONE), Benchmark(DATA)
    encoder = Encoder(tokenizer, max_tokens=mini().training.max_tokens)
    for name in TASKS:
        for e in encoder.encode(source.task(name), source.examples(name, "train")):
            assert len(e.answer) == 2, (e.example.label, "and the end of sequence")
            assert not e.cut


SMALL = {"train_limit": 64, "test_limit": 16}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("method", "dtype"), [(m, d) for m in ("sfor", "o-lora-hard") for d in ("float32", "bfloat16")])
def test_protection_is_exact_in_the_saved_files(method, dtype, tmp_path):
    fewer = {"train_limit": 16, "test_limit": 2, "dtype": dtype}  # many processors compute in bfloat16 slowly
    record = run_sequence(mini().changed(fewer), METHODS[method], order=TASKS[:2], seed=42, out=tmp_path)
    found, largest_zero = saved.drift(*saved.folders(tmp_path, TASKS[:2]))
    assert found["rho"] <= largest_zero
    assert found["d_eff"] > 0.1
    assert record.base_model.dtype == dtype
    assert {f.kind for f in record.data.values()} == {"made by this project"}


@pytest.mark.slow
def test_controls_leave_residuals_orders_of_magnitude_above_it(tmp_path):
    for method in ("projected-lora", "projected-lora-wrp", "projected-lora-freeze-b"):
        run_sequence(mini().changed(SMALL), METHODS[method], order=TASKS[:2], seed=42, out=tmp_path / method)
        found, largest_zero = saved.drift(*saved.folders(tmp_path / method, TASKS[:2]))
        assert found["rho"] > 1e4 * largest_zero, method


@pytest.mark.slow
def test_it_is_hard_enough_to_be_worth_running(tmp_path):
    """Three seeds of seq-lora: learned well above chance and below 100 %, and visibly forgotten."""
    records = [
        run_sequence(mini(), METHODS["seq-lora"], order=TASKS, seed=seed, out=tmp_path / str(seed)) for seed in (38, 42, 2026)
    ]
    assert statistics.mean(r.scores.BWT for r in records) <= -5
    chance = {name: 100 / len(Benchmark(DATA).task(name).labels) for name in TASKS}
    for i, name in enumerate(TASKS):
        learned = statistics.mean(r.accuracy[i][i] for r in records)
        assert chance[name] + 20 < learned < 98, (name, learned)
