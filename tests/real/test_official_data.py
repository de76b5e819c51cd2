"""The benchmark's own files, where they are at hand: ANCHORLORA_SHARED names a folder with data/ and base models/."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from anchorlora.data import Benchmark, Encoder, read_answer
from anchorlora.data.benchmark import OWN_WORDING
from anchorlora.data.importing import agrees, import_benchmark, verify_benchmark
from anchorlora.recipes.protocol import TASKS

SHARED = Path(os.environ.get("ANCHORLORA_SHARED", Path(__file__).parents[3] / "shared"))
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no benchmark data: set ANCHORLORA_SHARED to a folder with data/"),
]
DATA = SHARED / "data/standard_cl"
ALL = SHARED / "data/cl_benchmark"

# test row 0 of the official files (OLORA_FACTS 1.3): characters and SHA-256 of the whole prompt
GOLDEN = {
    "agnews": (413, "8df46cff285c34c8e8e8fc8864f4343a7b90160c5c8f1798e8d8e34fbdbc6502"),
    "dbpedia": (419, "d6ed474950b73296ee3b475f008878997928a110e97e295b277d4ab2814ef079"),
    "amazon": (398, "3fd15e839142e495fa1270733e67442e14c7f76841eb7734352ace16c87461b8"),
}
INSTRUCTIONS = {
    "TC": (74, "f186b34d7261270927f35d2a2bcb30e7632fb7adb638736ad235c1caf20d40c9"),
    "SC": (78, "850440f01644fe80aae657b53afc8f471734694e11ee128164606fa11bae7bf3"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_prompts_are_byte_equal_to_the_official_ones(name):
    benchmark = Benchmark(DATA)
    prompt = benchmark.task(name).prompt(next(benchmark.examples(name, "test", limit=1)).sentence)
    assert (len(prompt), hashlib.sha256(prompt.encode()).hexdigest()) == GOLDEN[name]


@pytest.mark.parametrize("group", INSTRUCTIONS)
def test_instructions_are_the_official_strings(group):
    task = next(t for t in map(Benchmark(DATA).task, TASKS) if t.group == group)
    assert (len(task.instruction), hashlib.sha256(task.instruction.encode()).hexdigest()) == INSTRUCTIONS[group]


def test_the_four_task_folder_verifies_and_says_what_is_exact():
    found = verify_benchmark(DATA)
    assert all(map(agrees, found.values()))
    assert found["TC/dbpedia/test.json"] == found["SC/amazon/train.json"] == found["TC/agnews/train.json"] == "official bytes"
    assert found["TC/dbpedia/train.json"].startswith("subset")
    assert found["TC/yahoo/test.json"].startswith("holdout")


def test_counts_and_label_sets():
    benchmark = Benchmark(DATA)
    counts = {n: (len(list(benchmark.examples(n, "train", limit=10_000))), len(list(benchmark.examples(n, "test")))) for n in TASKS}
    assert counts == {"dbpedia": (10_000, 7_600), "amazon": (5_000, 7_600), "yahoo": (7_795, 1_500), "agnews": (4_000, 7_600)}
    assert [len(benchmark.task(n).labels) for n in TASKS] == [14, 5, 10, 4]
    assert not any(benchmark.task(name).instruction == OWN_WORDING for name in benchmark.names)


def test_every_label_of_every_task_means_itself():
    benchmark = Benchmark(ALL)
    for name in benchmark.names:
        labels = benchmark.task(name).labels
        for label in labels:
            assert read_answer(label, gold=label, labels=labels).correct, (name, label)


def test_no_text_of_a_training_file_stands_in_its_test_file():
    benchmark = Benchmark(DATA)
    for name in TASKS:
        train = {e.sentence for e in benchmark.examples(name, "train")}
        assert not train & {e.sentence for e in benchmark.examples(name, "test")}, name


def test_official_files_are_recognized_by_their_git_blob_and_others_are_not():
    found = verify_benchmark(ALL)
    exact = sum(kind == "official bytes" for kind in found.values())
    assert exact == 39
    assert sorted(path for path, kind in found.items() if not agrees(kind)) == [
        "TC/dbpedia/train.json",
        "TC/yahoo/test.json",
        "TC/yahoo/train.json",
    ]


def test_an_odd_official_test_file_is_read_and_its_odd_labels_are_never_right():
    examples = list(Benchmark(ALL).examples("MNLI", "test"))
    assert sum(e.label == "-" for e in examples) == 131
    assert not any(read_answer("", gold=e.label, labels=("neutral",)).correct for e in examples)


def test_importing_the_folder_keeps_kinds_and_hashes(tmp_path):
    manifest = import_benchmark(str(DATA), tmp_path / "copy")
    original = json.loads((DATA / "MANIFEST.json").read_text())["files"]
    assert {p: (e["sha256"], e["kind"], e["instances"]) for p, e in manifest["files"].items() if p.startswith(("TC", "SC"))} == {
        p: (e["sha256"], e["kind"], e["instances"]) for p, e in original.items() if p.startswith(("TC", "SC"))
    }


def test_a_real_tokenizer_never_loses_the_cue_nor_the_label():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "backbones/mini-en")
    benchmark, encoder = Benchmark(DATA), Encoder(tokenizer, max_tokens=512)
    cut = 0
    for name in TASKS:
        task = benchmark.task(name)
        rows = sorted(benchmark.examples(name, "train"), key=lambda e: -len(e.sentence))[:60]
        for e in encoder.encode(task, rows):
            assert tokenizer.decode(e.prompt).endswith("\nAnswer:")
            assert tokenizer.decode(e.answer) == e.example.label + tokenizer.eos_token
            assert len(e.prompt) + len(e.answer) <= 512
            cut += e.cut
    assert cut > 50, "yahoo has passages of thousands of characters"
