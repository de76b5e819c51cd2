"""Writes the four tasks in CL_Benchmark layout: `python make_data.py OUT`.  The same bytes every time."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import classes

TRAIN, TEST = 640, 160  # examples a task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    files: dict[str, dict[str, Any]] = {}

    def write(relative: str, content: Any) -> None:
        path = out / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=0) + "\n")
        count = len(content) if isinstance(content, list) else None
        files[relative] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "instances": count,
            "kind": "made by this project",
        }

    for task, (labels, _) in classes.TASKS.items():
        folder, seen = f"{classes.GROUPS[task]}/{task}", set[str]()
        write(f"{folder}/labels.json", labels)
        write(f"{folder}/test.json", classes.examples(task, "test", TEST, seen))
        write(f"{folder}/train.json", classes.examples(task, "train", TRAIN, seen))
    texts = {group: [{"instruction_type": "zero-shot", "instruction": text}] for group, text in classes.INSTRUCTIONS.items()}
    write("instruction_config.json", texts)
    manifest = {"schema": 1, "note": "made by tools/mini/make_data.py", "source": {}, "files": files}
    (out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")


main()
