"""Tasks made of official texts by tools/real_text.py: the same whatever the order of the files; no label twice in the pairs."""

from __future__ import annotations

import json
import random
import runpy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from anchorlora.data import Benchmark
from anchorlora.data.importing import agrees, verify_benchmark

ROOT = Path(__file__).parents[2]
LABELS = {
    "TC/dbpedia": [
        "Company", "Educational Institution", "Artist", "Athlete", "Office Holder", "Mean of Transportation", "Building",
        "Natural Place", "Village", "Animal", "Plant", "Album", "Film", "Written Work",
    ],
    "TC/yahoo": [
        "Society & Culture", "Science & Mathematics", "Health", "Education & Reference", "Computers & Internet", "Sports",
        "Business & Finance", "Entertainment & Music", "Family & Relationships", "Politics & Government",
    ],
    "TC/agnews": ["World", "Sports", "Business", "Science or Technology"],
    "SC/amazon": ["very negative", "negative", "neutral", "positive", "very positive"],
}  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools/real_text.py")))


@pytest.fixture
def official(tmp_path: Path) -> Path:
    for task, labels in LABELS.items():
        folder = tmp_path / "official" / task
        folder.mkdir(parents=True)
        (folder / "labels.json").write_text(json.dumps(labels))
        for split in ("train", "test"):
            examples = [{"label": label, "sentence": f"{split} {label} {i}"} for label in labels for i in range(3)]
            (folder / f"{split}.json").write_text(json.dumps(examples))
    asked = {kind: [{"instruction_type": "zero-shot", "instruction": "Which? "}] for kind in ("TC", "SC")}
    (tmp_path / "official" / "instruction_config.json").write_text(json.dumps(asked))
    return tmp_path / "official"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.json"))}


def test_the_order_of_the_official_files_does_not_matter(tool: SimpleNamespace, official: Path, tmp_path: Path) -> None:
    tool.make(official, tmp_path / "one", tool.TASKS)
    for path in official.rglob("train.json"):
        examples = json.loads(path.read_text())
        random.Random(3).shuffle(examples)
        path.write_text(json.dumps(examples))
    tool.make(official, tmp_path / "other", tool.TASKS)
    assert files(tmp_path / "one") == files(tmp_path / "other")


def test_fifteen_pairs_hold_every_label_of_three_sources_once(tool: SimpleNamespace, official: Path, tmp_path: Path) -> None:
    tasks = tool.pairs(official)
    assert len(tasks) == 15
    for source in tool.PAIRED:
        found = list(chain.from_iterable(labels for official_task, labels in tasks.values() if official_task == source))
        assert found == LABELS[source]
    tool.make(official, tmp_path / "pairs", tasks)
    for task, (_, labels) in tasks.items():
        assert json.loads((tmp_path / "pairs" / task / "labels.json").read_text()) == list(labels)
        for split in ("train", "test"):
            examples = json.loads((tmp_path / "pairs" / task / f"{split}.json").read_text())
            assert {e["label"] for e in examples} == set(labels)
            assert all(e["sentence"].startswith(split) for e in examples)


def test_what_the_tool_writes_can_be_run_as_it_is(tool: SimpleNamespace, official: Path, tmp_path: Path) -> None:
    tool.main([str(official), str(tmp_path / "real")])
    found = verify_benchmark(tmp_path / "real")
    assert len(found) == 3 * len(tool.TASKS) + 1
    assert all(map(agrees, found.values()))
    said = {e.label for e in Benchmark(tmp_path / "real").examples("agnews", "train")}  # an official name, other bytes
    assert said == set(LABELS["TC/agnews"])


def test_recipes_name_the_tasks_that_the_tool_makes(tool: SimpleNamespace, official: Path) -> None:
    from ruamel.yaml import YAML

    for name, tasks in (("real_text", tool.TASKS), ("real_pairs", tool.pairs(official))):
        recipe = YAML(typ="safe").load(ROOT / f"benchmarks/{name}.yaml")
        for order in recipe["tasks"]["orders"].values():
            assert len(set(order)) == len(order)
            assert set(order) <= {task.split("/")[1] for task in tasks}
