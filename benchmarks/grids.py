"""A grid of eight short runs: processes forked from one that has imported everything, beside processes that import it each."""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from anchorlora.config import RunConfig
from anchorlora.recipes import mini
from anchorlora_lab.grid.scheduler import LocalEngine, Planned
from benchmarks.timing import report

RUNS, SLOTS = 8, 2
SHORT = {"train_limit": 8, "test_limit": 2, "epochs": 1, "max_new_tokens": 2, "threads": 1}


def warm() -> None:
    """Two tasks of eight examples a run, on the mini base model, two slots; of imports, a run needs the same whatever its size."""
    seconds = {warm: _seconds(warm) for warm in (True, False)}
    for number, kind in enumerate(("wall", "CPU")):
        forked, fresh = seconds[True][number], seconds[False][number]
        detail = f"{forked:.1f} s instead of {fresh:.1f} s"
        report(f"a grid of {RUNS} short runs in {SLOTS} slots: {kind} time, forked / fresh", forked / fresh, "< 0.5", detail)


def _seconds(warm: bool) -> tuple[float, float]:
    """Wall time, and CPU time of all processes."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        config = RunConfig(method="sfor", order=("reviews", "news"), seed=0, recipe=mini().changed(SHORT))
        planned = [Planned(root / str(seed), config.model_copy(update={"seed": seed})) for seed in range(RUNS)]
        began, used = time.perf_counter(), _used()
        outcomes = LocalEngine(SLOTS, warm=warm).run(planned, root=root)
        assert [outcome.status for outcome in outcomes] == ["done"] * RUNS, outcomes
        return time.perf_counter() - began, _used() - used


def _used() -> float:
    """CPU seconds of the processes that have ended, and of those that they waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


if __name__ == "__main__":
    warm()
