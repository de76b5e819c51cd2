"""What one save within a task costs beside the hundred steps between two saves."""

from __future__ import annotations

import tempfile
from pathlib import Path

from anchorlora.constraints import Freeze, ProjectDisplacement, ProjectGradient
from anchorlora.continual.progress import Progress
from anchorlora.features.store import FeatureStore
from anchorlora.runs.checkpoint import Checkpoint
from benchmarks.steps import Loop, base_model, window
from benchmarks.timing import ratio, report, side_by_side

EVERY = 100  # optimizer steps between two saves, the default


def checkpoint() -> None:
    """On the mini base model, eight examples in one forward: the shortest steps that a run of this project has."""
    loop = Loop(
        [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")], history=0, batch=window(base_model().tokenizer, micro=8)
    )
    rows, counted = FeatureStore(limit=128, held_out=32, spread=False), iter(range(1, 10**6))
    with tempfile.TemporaryDirectory() as name, rows.collect(loop.blocks.model):
        loop()  # fills the rows and the optimizer's state

        def save() -> None:
            progress = Progress.of(loop.optimizer, rows, number=2, step=next(counted), steps=10**6, seconds=0.0)
            Checkpoint(Path(name), Path(name) / "trace.jsonl").write_progress(progress)

        times = side_by_side({"save": save, "step": loop}, rounds=20)
    share = ratio(times, "save", "step") / EVERY
    report(f"a save within a task / {EVERY} steps of sfor; one forward of 8", share, "0.01")
