"""A grid of 40 small runs: one Slurm array on this machine, beside the local engine.  python -m benchmarks.engines [RUNS]"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from anchorlora.config import RunConfig
from anchorlora.recipes import mini
from anchorlora_lab.grid.scheduler import Engine, LocalEngine, Planned
from anchorlora_lab.grid.slurm import SlurmEngine
from benchmarks.timing import report

RUNS, SLOTS = 40, 2


def slurm(runs: int = RUNS) -> None:
    """Two tasks of mini a run. The runs of a Slurm task share their imports, as all local runs do."""
    engines: dict[str, Engine] = {
        "slurm": SlurmEngine(max_running=SLOTS, wait=True, per_task=-(-runs // SLOTS), poll=1.0),
        "local": LocalEngine(SLOTS),
    }
    seconds = {name: _seconds(engine, runs) for name, engine in engines.items()}
    detail = f"{seconds['slurm']:.0f} s beside {seconds['local']:.0f} s"
    report(
        f"a grid of {runs} small runs, {SLOTS} at a time: wall time, Slurm / local",
        seconds["slurm"] / seconds["local"],
        "<= 1.3",
        detail,
    )


def _seconds(engine: Engine, runs: int) -> float:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # a folder that the node sees
        root = Path(name)
        config = RunConfig(method="sfor", order=("reviews", "news"), seed=0, recipe=mini())
        planned = [Planned(root / str(seed), config.model_copy(update={"seed": seed})) for seed in range(runs)]
        began = time.perf_counter()
        outcomes = engine.run(planned, root=root)
        assert [outcome.status for outcome in outcomes] == ["done"] * runs, outcomes
        return time.perf_counter() - began


if __name__ == "__main__":
    slurm(*(int(word) for word in sys.argv[1:]))
