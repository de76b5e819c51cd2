"""Makes tasks of real text that a small model learns, of CL_Benchmark: python tools/real_text.py CL_BENCHMARK OUT [--pairs]

The official tasks of Standard CL have up to fourteen labels, and a model of a few million parameters learns only some of them. Here
each task has two to five labels of an official task; its examples are the official ones, ordered by SHA-256 of their sentence, so
that the order of the files does not matter. No score on them can be compared with a published one. benchmarks/real_text.yaml is the
recipe. With --pairs, fifteen tasks of two labels, no label twice within a source: a long sequence (benchmarks/real_pairs.yaml).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path

from anchorlora.data.importing import import_benchmark

TRAIN, TEST = 4000, 1500  # at most

TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "TC/dbpedia-people": ("TC/dbpedia", ("Company", "Educational Institution", "Artist", "Athlete", "Office Holder")),
    "TC/dbpedia-places": ("TC/dbpedia", ("Mean of Transportation", "Building", "Natural Place", "Village")),
    "TC/dbpedia-works": ("TC/dbpedia", ("Animal", "Plant", "Album", "Film", "Written Work")),
    "TC/agnews": ("TC/agnews", ("World", "Sports", "Business", "Science or Technology")),
    "TC/yahoo-four": ("TC/yahoo", ("Health", "Computers & Internet", "Sports", "Politics & Government")),
    "SC/amazon-two": ("SC/amazon", ("very negative", "very positive")),
}


PAIRED = ("TC/dbpedia", "TC/yahoo", "TC/agnews")


def pairs(source: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Tasks of two labels, neighbors in the official list; of amazon the two ends."""
    tasks = {"SC/amazon-two": TASKS["SC/amazon-two"]}
    for official in PAIRED:
        labels = json.loads((source / official / "labels.json").read_text(encoding="utf-8"))
        for i, pair in enumerate(zip(labels[::2], labels[1::2], strict=True), 1):
            tasks[f"{official}-{i}"] = (official, pair)
    return tasks


def make(source: Path, out: Path, tasks: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    for task, (official, labels) in tasks.items():
        folder = out / task
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "labels.json").write_text(json.dumps(list(labels)))
        for split, most in (("train", TRAIN), ("test", TEST)):
            examples = json.loads((source / official / f"{split}.json").read_text(encoding="utf-8"))
            mine = [e for e in examples if e["label"] in labels]
            mine.sort(key=lambda e: hashlib.sha256(e["sentence"].encode()).hexdigest())
            (folder / f"{split}.json").write_text(json.dumps(mine[:most], ensure_ascii=False, indent=1), encoding="utf-8")
            print(f"{task}/{split}.json: {len(mine[:most])} of {len(examples)}")
    (out / "instruction_config.json").write_bytes((source / "instruction_config.json").read_bytes())


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a folder in the layout of CL_Benchmark")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", action="store_true", help="fifteen tasks of two labels instead of six tasks of two to five")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        make(arguments.source, Path(folder), pairs(arguments.source) if arguments.pairs else TASKS)
        import_benchmark(folder, arguments.out)  # with a manifest: agnews keeps its name, and runs refuse it unless it is adopted


if __name__ == "__main__":
    main()
