"""One of two processes of a run, or the only one.

A case is METHOD:MODE, such as sfor:sharded-packed. Each run goes to FOLDER/<number of processes>/<case>.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

from anchorlora import METHODS, run_sequence
from anchorlora.config import Recipe
from anchorlora.continual import inputs
from anchorlora.errors import Interrupted
from anchorlora.processes import following, launched
from anchorlora.recipes import mini
from anchorlora.runs import autosave

ORDER = ["reviews", "news"]
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def recipe_of(mode: str) -> Recipe:
    """18 examples in windows of 8: the last window has fewer examples than the others, and one process fewer than the other."""
    fields = {"train_limit": 18, "test_limit": 3, "epochs": 1, "max_new_tokens": 4, "window": 8, "micro_batch": 3, "eval_batch": 2}
    fields |= {"device": "cpu", "dtype": "float32", "dropout": 0.1 if mode == "stopped" else 0.0, "threads": 1}
    fields |= {"batching": "packed"} if "packed" in mode else {}
    fields |= {"quantized": "nf4", "dtype": "bfloat16"} if "quantized" in mode else {}
    fields |= {"gradient_checkpointing": True} if "checkpointing" in mode else {}
    return mini().changed(fields)


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for case in cases:
        method, _, mode = case.partition(":")
        for name, value in SHARDED.items():
            os.environ.pop(name, None)
            if "sharded" in mode and launched() > 1:
                os.environ[name] = value  # as `accelerate launch` does
        out = folder / str(launched()) / case
        how = {"order": ORDER, "seed": 42, "save_every": 2}
        if mode in ("stopped", "quantized") and launched() == 1:
            continue
        if mode == "stopped":
            stopped_and_gone_on(method, out, how)
        if launched() == 1:
            run_sequence(recipe_of(mode), METHODS[method], out=out, **how)
            continue
        split = watched_split()
        run_sequence(recipe_of(mode), METHODS[method], out=out, **how)
        assert bool(split) == ("sharded" in mode)
        print(case, flush=True)


def stopped_and_gone_on(method: str, out: Path, how: dict) -> None:
    """Begin the run beside the undisturbed one; only the last process is asked to stop, within the second task."""
    stop, steps = autosave.Stop(), [0]
    whole = autosave.Stopping.on_step_boundary

    def counted(self, step, snapshot):
        steps[0] += 1
        if steps[0] == 5 and following():
            stop.ask("SIGTERM")
        whole(self, step, snapshot)

    autosave.Stopping.on_step_boundary = counted
    with pytest.raises(Interrupted, match="SIGTERM: saved after step 2 of task 2"):
        run_sequence(recipe_of("stopped"), METHODS[method], out=out.with_name(f"{out.name}-twice"), stop=stop, **how)
    autosave.Stopping.on_step_boundary = whole
    run_sequence(recipe_of("stopped"), METHODS[method], out=out.with_name(f"{out.name}-twice"), **how)


def watched_split() -> list:
    """Names of the parameters of base models that FSDP splits from here on."""
    found: list = []
    split = getattr(inputs._split, "whole", inputs._split)

    def noting(model, accelerator):
        split(model, accelerator)
        found.extend(name for name, p in model.named_parameters() if hasattr(p, "placements"))
        assert not any("lora_" in name for name in found)

    noting.whole = split
    inputs._split = noting
    return found
