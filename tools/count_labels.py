"""Counts the labels of the examples that runs were trained and tested on:  python tools/count_labels.py DATA RESULTS

Writes RESULTS/labels.json, for records of versions that did not count them: task -> label -> {"train", "test"}, for every label of
the task. A file below DATA is a run's if it has the SHA-256 of its record, whatever it is called.
"""

import hashlib
import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from anchorlora.store.record import LABELS_FILE, RECORD_FILE, read_record
from anchorlora_lab.report.records import Run


def count(data: Path, results: Path) -> dict[str, dict[str, dict[str, int]]]:
    """The labels of the examples of every task of the runs.  Raises KeyError for a file that is not below `data`."""
    places = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in sorted(data.rglob("*.json"))}
    counted: dict[str, dict[str, dict[str, int]]] = {}

    @cache
    def read(sha256: str):
        return json.loads(places[sha256].read_text())

    for run in (Run(path.parent, read_record(path)) for path in sorted(results.rglob(RECORD_FILE))):
        hashes = {Path(path).parts[-2:]: file.sha256 for path, file in run.record.data.items()}
        for task in run.order:
            sizes = run.record.protocol["examples"][task]
            found = {part: Counter(e["label"] for e in read(hashes[task, f"{part}.json"])[: sizes[part]]) for part in sizes}
            mine = {label: {part: found[part][label] for part in sizes} for label in read(hashes[task, "labels.json"])}
            if counted.setdefault(task, mine) != mine:
                raise ValueError(f"{run.folder} read other examples of {task} than the runs before it")
    return counted


if __name__ == "__main__":
    if len(sys.argv) != 3 or not all(Path(each).is_dir() for each in sys.argv[1:]):
        raise SystemExit(__doc__)
    content = count(Path(sys.argv[1]), Path(sys.argv[2]))
    (Path(sys.argv[2]) / LABELS_FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
