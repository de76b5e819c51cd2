"""Every method over a sequence of tasks at its best learning rate, for docs/lab/own-methods.md.

The rate is chosen by AA on the holdout of order1, seed 42: of rates within 0.1 point of the best, the smallest. While that is the
lowest or the highest that ran, the next rate of the ladder runs, too. Then the row runs at it, over all orders and seeds, on the
test examples. An update scaled by c is a block merged with c after each task but the first.

Run: python -m benchmarks.best_rates OUT RECIPE [WORDS OF GRID ..]; called again, only what is missing. RECIPE is mini or a file.
OUT/holdout holds the runs that choose, a folder for each rate, and OUT/test the runs at the chosen rates.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from anchorlora_lab.report.records import find_runs

LADDER = ("3e-5", "1e-4", "3e-4", "1e-3", "2e-3", "4e-3", "8e-3")
FIRST = LADDER[2:5]  # what every row runs; any other that ran counts, too
ROWS = {  # name -> the method and its numbers
    "seq-lora": ("seq-lora", ""),
    "seq-lora-scaled-0.5": ("snapshot", "MergedPerTask.share=0.5"),
    "seq-lora-scaled-0.7": ("snapshot", "MergedPerTask.share=0.7"),
    "replay-5": ("replay", "Rehearsal.share=0.05"),
    "replay-25": ("replay", "Rehearsal.share=0.25"),
    "sfor": ("sfor", ""),
    "o-lora-hard": ("o-lora-hard", ""),
    "sensitive-core": ("sensitive-core", ""),
    "brake": ("brake", ""),
    "fold-16": ("fold-16", ""),
    "fold-64": ("fold-64", ""),
}
CLOSE = 0.1  # points of AA


def grid(out: Path, recipe: str, row: str, rate: str, *words: str) -> None:
    """Run a row at a rate where it is missing."""
    method, number = ROWS[row]
    sets = [f"--set={each}" for each in (f"learning_rate={rate}", number) if each]
    command = [
        sys.executable,
        "-m",
        "anchorlora",
        "grid",
        recipe,
        "--methods",
        method,
        *sets,
        "--slots",
        "1",
        "--out",
        str(out),
        *words,
    ]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def chosen(out: Path, recipe: str, row: str, *words: str) -> str:
    """Return the rate of a row that the holdout prefers, after the runs that this takes."""
    tried = {*FIRST, *(place.name for place in (out / "holdout" / row).glob("*"))}
    while True:
        for rate in tried:
            where = out / "holdout" / row / rate
            grid(where, recipe, row, rate, "--orders=order1", "--seeds=42", "--set=tested_on=holdout", *words)
        ended = {rate: find_runs([out / "holdout" / row / rate])[0].record.scores.AA for rate in tried}
        best = next(rate for rate in LADDER if ended.get(rate, -1) >= max(ended.values()) - CLOSE)
        i = LADDER.index(best)
        beyond = {*LADDER[max(i - 1, 0) : i + 2]} - tried
        if not beyond:
            return best
        tried |= beyond


def main() -> None:
    out, recipe, *words = Path(sys.argv[1]), *sys.argv[2:]
    for row in ROWS:
        rate = chosen(out, recipe, row, *words)
        print(f"{row}: {rate}", flush=True)
        grid(out / "test" / row, recipe, row, rate, *words)


if __name__ == "__main__":
    main()
