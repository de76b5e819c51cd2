"""Write the tables of docs/train.md from the results of benchmarks/keeping.py.

python tools/fill_keeping.py [FOLDER]       # results/keeping by default
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from anchorlora.scores import paired_interval

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/train.md", ROOT / "results/keeping"
NEEDS = {
    "before": "",
    "plain PEFT": "nothing",
    "replay 5 %": "old examples, again and again",
    "KL on own text": "a second model in memory",
    "OSF": "nothing; trains and stores full weights",
    "block": "nothing",
    "keep old text": "200 old examples and 200 passages, once",
    "keep self": "nothing",
    "keep old text sensitive-core": "200 old examples and 200 passages, once",
    "keep old text fold-16": "200 old examples and 200 passages, once",
    "keep self sensitive-core": "nothing",
    "keep old text, same size": "200 old examples and 200 passages, once",
    "keep self, same size": "nothing",
    "OPLoRA": "nothing",
}
WORDS = {
    "before": "before",
    "plain PEFT": "the old adapter trained further, plain PEFT",
    "replay 5 %": "the same, replay of 5 %",
    "KL on own text": "the same, KL to the old model on its own text",
    "OSF": "PEFT's OSF on the merged model",
    "block": "a new block, unprotected",
    "keep old text": "`--keep` old text",
    "keep self": "`--keep self`",
    "keep old text sensitive-core": "`--keep` old text `--method sensitive-core`",
    "keep old text fold-16": "`--keep` old text `--method fold-16`",
    "keep self sensitive-core": "`--keep self --method sensitive-core`",
    "keep old text, same size": "`--keep` old text `--same-size`",
    "keep self, same size": "`--keep self --same-size`",
    "OPLoRA": "`--method oplora`",
}
MEASURED = (("agnews", "exact_match"), ("dbpedia", "exact_match"), ("text", "loss"))
PAIRS = (
    ("keep self", "keep old text"),
    ("keep self", "block"),
    ("keep self", "plain PEFT"),
    ("keep old text", "block"),
    ("keep old text", "plain PEFT"),
    ("keep old text", "replay 5 %"),
    ("keep self", "KL on own text"),
    ("keep self", "OSF"),
    ("keep old text sensitive-core", "keep old text"),
    ("keep old text fold-16", "keep old text"),
    ("keep self sensitive-core", "keep self"),
    ("keep old text, same size", "plain PEFT"),
    ("keep self, same size", "plain PEFT"),
    ("keep old text, same size", "replay 5 %"),
)


def scores(found: Sequence[dict[str, Any]], task: str, metric: str) -> list[float]:
    """Scores of all examples of all seeds."""
    unit = 100.0 if metric == "exact_match" else 1.0
    return [unit * value for each in sorted(found, key=lambda r: r["seed"]) for value in each["scores"][task][metric]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tables(results: dict[str, list[dict[str, Any]]]) -> str:
    """The table of variants, and the table of paired differences over the seeds that both have."""
    rows = []
    for name in WORDS:
        if name not in results:
            continue
        a, d, t = (mean(scores(results[name], *where)) for where in MEASURED)
        seconds, peaks = ([r[key] for r in results[name] if key in r] for key in ("cpu_seconds", "peak"))
        stored = mean([r["bytes"] for r in results[name]])
        cost = [
            f"{mean(seconds):.0f}" if seconds else "",
            f"{mean(peaks) / 1e6:.0f}" if peaks else "",
            f"{stored / 1e6:.2f}" if stored else "",
        ]
        rows.append([WORDS[name], NEEDS[name], str(len(results[name])), f"{a:.1f}", f"{d:.1f}", f"{t:.3f}", *cost])
    heads = [
        "variant",
        "needs",
        "seeds",
        "agnews, new, %",
        "dbpedia, old, %",
        "text, loss",
        "CPU seconds",
        "peak memory, MB",
        "stored, MB",
    ]
    first = tabulate(rows, heads, tablefmt="github", disable_numparse=True, colalign=("left", "left", *["right"] * 7))
    lines = []
    for pair in PAIRS:
        if not all(name in results for name in pair):
            continue
        seeds = set.intersection(*({r["seed"] for r in results[name]} for name in pair))
        ours, theirs = ([r for r in results[name] if r["seed"] in seeds] for name in pair)
        cells = []
        for where in MEASURED:
            was, now = scores(theirs, *where), scores(ours, *where)
            low, high = paired_interval(was, now)
            digits = 3 if where[1] == "loss" else 1
            cells.append(f"{mean(now) - mean(was):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})")
        lines.append([f"{WORDS[pair[0]]} against {WORDS[pair[1]]}", str(len(seeds)), *cells])
    heads = ["difference (95 % interval)", "seeds", "agnews, points", "dbpedia, points", "text, loss"]
    second = tabulate(lines, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 4))
    return f"{first}\n\n{second}\n"


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Name of a variant -> its results, one for each seed."""
    results: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text())
        results.setdefault(found["variant"], []).append(found)
    return results


def filled(page: str, results: dict[str, list[dict[str, Any]]]) -> str:
    return re.sub(r"(<!-- keeping -->\n).*?(<!-- /keeping -->)", lambda m: m[1] + tables(results) + m[2], page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), read(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)))
