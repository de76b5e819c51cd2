"""A grid of eight short runs: processes forked from one that has imported everything, beside processes that import it each."""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from anchorlora.config import Recipe, RunConfig
from anchorlora.recipes import mini
from anchorlora_lab.grid.scheduler import Engine, LocalEngine, Planned
from benchmarks.timing import report

RUNS, SLOTS = 8, 2
SHORT = {"train_limit": 8, "test_limit": 2, "epochs": 1, "max_new_tokens": 2, "threads": 1}


def warm() -> None:
    """Two tasks of eight examples a run, on the mini base model, two slots; of imports, a run needs the same whatever its size."""
    seconds = {warm: taken(LocalEngine(SLOTS, warm=warm), RUNS, mini().changed(SHORT)) for warm in (True, False)}
    for number, kind in enumerate(("wall", "CPU")):
        forked, fresh = seconds[True][number], seconds[False][number]
        detail = f"{forked:.1f} s instead of {fresh:.1f} s"
        report(f"a grid of {RUNS} short runs in {SLOTS} slots: {kind} time, forked / fresh", forked / fresh, "< 0.5", detail)


def taken(engine: Engine, runs: int, recipe: Recipe, folder: Path | None = None) -> tuple[float, float]:
    """Wall time, and CPU time of all processes, for runs of two tasks in a folder of their own."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name)
        config = RunConfig(method="sfor", order=("reviews", "news"), seed=0, recipe=recipe)
        planned = [Planned(root / str(seed), config.model_copy(update={"seed": seed})) for seed in range(runs)]
        began, used = time.perf_counter(), _used()
        outcomes = engine.run(planned, root=root)
        assert [outcome.status for outcome in outcomes] == ["done"] * runs, outcomes
        return time.perf_counter() - began, _used() - used


def _used() -> float:
    """CPU seconds of the processes that have ended, and of those that they waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


if __name__ == "__main__":
    warm()
