"""A grid of 40 small runs: one Slurm array on this machine, beside the local engine.  python -m benchmarks.engines [RUNS]"""

from __future__ import annotations

import sys
from pathlib import Path

from anchorlora.recipes import mini
from anchorlora_lab.grid.scheduler import Engine, LocalEngine
from anchorlora_lab.grid.slurm import SlurmEngine
from benchmarks.grids import SLOTS, taken
from benchmarks.timing import report

RUNS = 40


def slurm(runs: int = RUNS) -> None:
    """Two tasks of mini a run. The runs of a Slurm task share their imports, as all local runs do."""
    engines: dict[str, Engine] = {
        "slurm": SlurmEngine(max_running=SLOTS, wait=True, per_task=-(-runs // SLOTS), poll=1.0),
        "local": LocalEngine(SLOTS),
    }
    # in a folder that the node sees
    seconds = {name: taken(engine, runs, mini(), Path.cwd())[0] for name, engine in engines.items()}
    detail = f"{seconds['slurm']:.0f} s beside {seconds['local']:.0f} s"
    report(
        f"a grid of {runs} small runs, {SLOTS} at a time: wall time, Slurm / local",
        seconds["slurm"] / seconds["local"],
        "<= 1.3",
        detail,
    )


if __name__ == "__main__":
    slurm(*(int(word) for word in sys.argv[1:]))
