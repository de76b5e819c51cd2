"""Counts the labels of the examples that runs were tested on:  python tools/count_labels.py DATA RESULTS

Writes RESULTS/labels.json: task -> label -> how many of the tested examples have it, for every label of the task. A file below DATA
is a run's if it has the SHA-256 of its record, whatever it is called.
"""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

from anchorlora.reports.records import find_runs

FILE = "labels.json"


def count(data: Path, results: Path) -> dict[str, dict[str, int]]:
    """The labels of the tested examples of every task of the runs.  Raises KeyError for a file that is not below `data`."""
    places = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in sorted(data.rglob("*.json"))}
    counted: dict[str, dict[str, int]] = {}
    for run in find_runs([results]):
        hashes = {Path(path).parts[-2:]: file.sha256 for path, file in run.record.data.items()}
        for task in run.order:
            labels, tested = (json.loads(places[hashes[task, name]].read_text()) for name in ("labels.json", "test.json"))
            found = Counter(example["label"] for example in tested[: run.record.protocol["examples"][task]["test"]])
            mine = {label: found[label] for label in labels}
            if counted.setdefault(task, mine) != mine:
                raise ValueError(f"{run.folder} was tested on other examples of {task} than the runs before it")
    return counted


if __name__ == "__main__":
    if len(sys.argv) != 3 or not all(Path(each).is_dir() for each in sys.argv[1:]):
        raise SystemExit(__doc__)
    content = count(Path(sys.argv[1]), Path(sys.argv[2]))
    (Path(sys.argv[2]) / FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
