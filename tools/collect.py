"""Copies what says how runs went, not what they answered or learned, into `results/`:  python tools/collect.py FROM TO

Records, configurations, traces and selections keep their places below FROM; adapters, states and logs stay behind. So do
predictions: right.json has a digit for each test example instead, which intervals over test examples are made of.
Configurations and records name folders of model and data, and files of methods, by their last part: where they lay is the
machine's business alone. Runs name the hash of the selection that they follow, so a selection is copied as it is, and refused
if it names a folder from the root or from a home. Then `tools/results.py pack` writes the study's file, which git has.
"""

import json
import re
import shutil
import sys
from pathlib import Path

from anchorlora.store.record import read_record
from anchorlora.store.run_folder import RIGHT_FILE
from anchorlora.store.selection import read_selection
from anchorlora_lab.report.comparability import model_label
from anchorlora_lab.report.records import find_runs

KEPT = ("record.json", "config.yaml", "trace.jsonl", "selection.json", "scale.json", "eval.json")


def collect(source: Path, to: Path) -> int:
    """Copy every finished run and every selection below `source`; returns how many files."""
    found = [path for name in KEPT for path in sorted(source.rglob(name)) if not any(p.startswith(".") for p in path.parts)]
    wanted = [path for path in found if path.name in ("selection.json", "scale.json") or (path.parent / "record.json").is_file()]
    for path in [path for path in wanted if path.name == "selection.json"]:
        if (name := read_selection(path).base_model["name"]).startswith(("/", "~")) or ":\\" in name:
            raise SystemExit(f"{path}: names the base model {name}; select again with a relative --model, such as ../models/tiny")
    for path in wanted:
        target = to / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if path.name == "config.yaml":
            target.write_text(without_places(path.read_text()))
        if path.name == "record.json":
            record = read_record(path)
            if (name := model_label(record.base_model.name)) != record.base_model.name:
                facts = record.base_model.model_copy(update={"name": name})
                target.write_text(record.model_copy(update={"base_model": facts}).as_json())  # with its hash made anew
    return len(wanted)


def collect_right(source: Path, to: Path) -> int:
    """Write the right.json of every run below `source` whose test examples are there from the first on; returns how many."""
    written = 0
    for run in find_runs([source]):
        rows: dict[str, dict[str, str]] = {}
        for name, answers in run.answers.items():
            for task in run.order:
                mine = [answers[place] for place in sorted(answers) if place[0] == task]
                if (task, len(mine) - 1) in answers:
                    rows.setdefault(name, {})[task] = "".join(str(int(right)) for right in mine)
        if rows and all(row.keys() == set(run.order) for row in rows.values()):
            (to / run.folder.relative_to(source) / RIGHT_FILE).write_text(json.dumps(rows, indent=0) + "\n")
            written += 1
    return written


def without_places(config: str) -> str:
    """The configuration with each local folder by its last part; a name of the hub, such as Qwen/Qwen3-8B, is no place."""
    return re.sub(r"^( +(?:data|model): |method: )[./~][\w./~-]*/([\w.:-]+)$", r"\1\2", config, flags=re.M)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(__doc__)
    files = collect(Path(sys.argv[1]), Path(sys.argv[2])) + collect_right(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"{files} files in {sys.argv[2]}")
