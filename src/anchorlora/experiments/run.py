"""One cell, start to record: loads what the configuration names, drives the sequence, saves each task, writes the record."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from anchorlora import embedded
from anchorlora.adapters import Scope
from anchorlora.continual.backbone import Backbone, load_backbone
from anchorlora.continual.past import Past
from anchorlora.continual.recipe import Cell, Recipe
from anchorlora.continual.sequence import Stage, TaskSequence, Watch
from anchorlora.diagnostics import held_out_drift, measure
from anchorlora.errors import ProtectionLost, Stopped
from anchorlora.exactness import is_zero, largest_zero
from anchorlora.experiments.directory import RunDirectory, StageFacts
from anchorlora.methods import CLAIMS, Method
from anchorlora.record import SCHEMA, Record, read_record
from anchorlora.scores import Scores
from anchorlora.tasks import Benchmark

PACKAGES = ("anchorlora", "torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors")


def run_sequence(
    recipe: Recipe,
    method: Method,
    *,
    order: Sequence[str],
    seed: int,
    out: Path,
    name: str | None = None,
    watch: Watch | None = None,
) -> Record:
    """Learn the tasks of `order` one after another and return the record of it, which is written last into `out`.

    A directory of the same configuration is gone on with, at its first unfinished task; a finished one is only read. `name`:
    what the configuration calls the method, if not by its own name. Raises ValueError for a directory of another configuration.
    """
    cell = Cell(method=name or method.name, order=tuple(order), seed=seed, recipe=recipe)
    directory, watch = RunDirectory(out), watch or Watch()
    if directory.record.exists():
        directory.claim(cell)
        return read_record(directory.record)
    if recipe.backbone.threads:
        torch.set_num_threads(recipe.backbone.threads)
    started = _now()
    sequence = _sequence(cell, method, watch)
    directory.claim(cell)
    done = directory.finished_tasks(order)
    directory.trim_log(len(done))
    if done:
        sequence.resume(*directory.restore(done, recipe.features))
    sequence.watch = _Logging(directory, watch)
    with closing(sequence.stages()) as stages:
        try:
            for stage in stages:
                _hold_to_claims(method, stage)
                done.append(directory.write_stage(stage, base=recipe.backbone.model or "", peak_memory_bytes=peak_memory()))
        except Stopped as error:
            task = order[len(done)]
            raise type(error)(f"{task} (task {len(done) + 1}): {error}; the state after task {len(done)} is kept") from None
    record = _record(cell, method, sequence, done, started)
    directory.write_record(record)
    return record


def _hold_to_claims(method: Method, stage: Stage) -> None:
    """A task whose promised protection did not hold is not saved as if it had."""
    claims, drift = CLAIMS.get(method.name), stage.drift
    if drift is None or claims is None or not claims.response or is_zero(drift["rho"], drift["rho_floor"]):
        return
    raise ProtectionLost(
        f"{method.name} promises no response on the core, but rho is {drift['rho']:.1e} and float32 storage explains "
        f"{largest_zero(drift['rho_floor']):.1e}; something wrote to the factors outside the optimizer's step"
    )


def peak_memory() -> int:
    """The largest memory this process has taken, in bytes: of the GPU where one is used, else resident."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def boundary_drift(scope: Scope, past: Past) -> dict[str, Any]:
    """A task's drift as the record has it: on its own cores, on the first and on all past cores, and on held-out rows."""
    facts: dict[str, Any] = {"task": past.tasks + 1, **measure(scope).as_dict()}
    facts["rho_first"] = measure(scope, past.first_cores).rho
    facts["rho_union"] = measure(scope, past.union_cores).rho
    facts["held_out"] = held_out_drift(scope, past.held_out) if past.held_out else None
    return facts


class _Logging(Watch):
    """Writes log.jsonl, and tells whoever else watches."""

    def __init__(self, directory: RunDirectory, inner: Watch) -> None:
        self.directory, self.inner, self.number = directory, inner, 0

    def task_begins(self, number, task, steps):
        self.number = number
        self.directory.log({"event": "task", "task": number, "name": task, "steps": steps, "at": _now()})
        self.inner.task_begins(number, task, steps)

    def step_done(self, event):
        self.directory.log({"event": "step", "task": self.number, **event})
        self.inner.step_done(event)

    def evaluation_begins(self, number, examples):
        self.inner.evaluation_begins(number, examples)

    def examples_done(self, count):
        self.inner.examples_done(count)

    def task_ends(self, stage):
        event = {"event": "evaluated", "task": stage.number, "accuracy": stage.accuracy, "illegal": stage.illegal, "at": _now()}
        self.directory.log(event)
        self.inner.task_ends(stage)


def _sequence(cell: Cell, method: Method, watch: Watch) -> TaskSequence:
    recipe = cell.recipe
    if recipe.tasks.data is None:
        raise ValueError("this recipe names no data; give a CL_Benchmark folder with --data")
    data = embedded.folder(recipe.tasks.data, "data") or Path(recipe.tasks.data).expanduser()
    benchmark = Benchmark(data)
    for task in cell.order:
        benchmark.task(task)
    backbone = load_backbone(recipe.backbone, folder=embedded.folder(recipe.backbone.model or "", "backbone"))
    return TaskSequence(backbone, benchmark, recipe, method, cell.order, cell.seed, boundary_drift, watch)


def _record(cell: Cell, method: Method, sequence: TaskSequence, done: Sequence[StageFacts], started: str) -> Record:
    rows = [facts.accuracy for facts in done]
    backbone, benchmark = sequence.backbone, sequence.benchmark
    cost = {
        "train_seconds": [facts.train_seconds for facts in done],
        "evaluate_seconds": sum(facts.evaluate_seconds for facts in done),
        "peak_memory_bytes": max(facts.peak_memory_bytes for facts in done),
        "trained_parameters": done[-1].trained_parameters,
        "stored_parameters": done[-1].stored_parameters,
        "history_bytes": done[-1].history_bytes,
    }
    return Record.model_validate(
        {
            "schema": SCHEMA,
            "method": method.name,
            "definition": method.definition,
            "recipe": cell.recipe.name,
            "backbone": backbone.facts(),
            "order": list(cell.order),
            "seed": cell.seed,
            "protocol": _protocol(cell.recipe, sequence),
            "threads": torch.get_num_threads(),
            "accuracy": rows,
            "illegal": [facts.illegal for facts in done],
            "scores": Scores.of(rows).as_dict(),
            "drift": [facts.drift for facts in done if facts.drift is not None],
            "sites": [facts.sites for facts in done],
            "cost": cost,
            "versions": {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()},
            "data": {path: {"sha256": f.sha256, "kind": f.kind} for path, f in sorted(benchmark.opened.items())},
            "host": _host(backbone),
            "started": started,
            "finished": _now(),
        }
    )


def _protocol(recipe: Recipe, sequence: TaskSequence) -> dict[str, Any]:
    """Every choice that a reader could make differently."""
    content = recipe.model_dump(mode="json", exclude={"name": True, "tasks": {"orders", "data"}, "backbone": {"model", "revision"}})
    counts = {name: {"train": len(sequence.train[name]), "test": len(sequence.test[name])} for name in sequence.order}
    cut = {name: sum(e.cut for e in (*sequence.train[name], *sequence.test[name])) for name in sequence.order}
    content["examples"], content["passages_cut"] = counts, cut
    content["own_wording"] = sorted(sequence.benchmark.own_wording)
    content["test_labels_not_listed"] = {
        name: odd
        for name in sequence.order
        if (odd := sum(e.example.label not in sequence.tasks[name].labels for e in sequence.test[name]))
    }
    content["optimizer"], content["decoding"], content["metric"] = (
        "AdamW, fresh for each task",
        "greedy, to the end of sequence",
        "exact match",
    )
    return content


def _host(backbone: Backbone) -> dict[str, Any]:
    host: dict[str, Any] = {"system": platform.system(), "machine": platform.machine(), "device": str(backbone.device)}
    if backbone.device.type == "cuda":
        host["gpu"] = torch.cuda.get_device_name(backbone.device)
    return host


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
