"""The record of a finished run: what it was, what came out, and every choice that a reader could make differently."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
import torch
from anchorlora.models.load import LoadedModel
from anchorlora.config import RunConfig
from anchorlora.continual.sequence import TaskSequence
from anchorlora.devices import device_name
from anchorlora.runs.directory import RunDirectory, StageFacts
from anchorlora.runs.provenance import versions
from anchorlora.methods import Method
from anchorlora.schemas.record import SCHEMA, Record
from anchorlora.scores import Scores
from anchorlora.tasks import fingerprint



# fields of the recipe that a record names elsewhere, or that say nothing about how a model was made
ELSEWHERE: Any = {"name": True, "trace": True, "tasks": {"orders", "data"}, "base_model": {"model", "revision"}}


def record_of(
    cell: RunConfig, method: Method, sequence: TaskSequence, directory: RunDirectory, done: Sequence[StageFacts], started: str
) -> Record:
    rows = [facts.accuracy for facts in done]
    base_model, benchmark = sequence.base_model, sequence.benchmark
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
            "base_model": base_model.facts(),
            "order": list(cell.order),
            "seed": cell.seed,
            "protocol": _protocol(cell, sequence, directory),
            "threads": torch.get_num_threads(),
            "accuracy": rows,
            "invalid": [facts.invalid for facts in done],
            "scores": Scores.of(rows).as_dict(),
            "drift": [facts.drift for facts in done if facts.drift is not None],
            "layers": [facts.layers for facts in done],
            "cost": cost,
            "versions": versions(),
            "data": {path: {"sha256": f.sha256, "kind": f.kind} for path, f in sorted(benchmark.opened.items())},
            "host": _host(base_model),
            "started": started,
            "finished": now(),
            "files": directory.files(done),
        }
    )


def _protocol(cell: RunConfig, sequence: TaskSequence, directory: RunDirectory) -> dict[str, Any]:
    """Every choice that a reader could make differently."""
    content = cell.recipe.model_dump(mode="json", exclude=ELSEWHERE)
    if cell.recipe.base_model.quantized is None:
        del content["base_model"]["quantized"]  # a record of full precision says no more than it ever did
    if cell.recipe.base_model.trust_remote_code is None:
        del content["base_model"]["trust_remote_code"]
    counts = {name: {"train": len(sequence.data.train[name]), "test": len(sequence.data.test[name])} for name in sequence.order}
    cut = {name: sum(e.cut for e in (*sequence.data.train[name], *sequence.data.test[name])) for name in sequence.order}
    content["examples"], content["passages_cut"] = counts, cut
    content["own_wording"] = sorted(sequence.benchmark.own_wording)
    content["test_labels_not_listed"] = {
        name: odd
        for name in sequence.order
        if (odd := sum(e.example.label not in sequence.data.tasks[name].labels for e in sequence.data.test[name]))
    }
    if cell.settings:
        content["tuned"], content["selection"] = cell.settings, cell.selection
    if cell.recipe.tasks.tested_on == "holdout":
        content["holdout_sha256"] = fingerprint({name: [e.example for e in test] for name, test in sequence.data.test.items()})
    if cell.recipe.trace.trace_points:
        content["task1_state"] = directory.fingerprint(1, cell.order[0])
    if inexact := directory.origin.inexact():
        content["inexact"] = inexact
    content["optimizer"], content["decoding"], content["metric"] = (
        "AdamW, fresh for each task",
        "greedy, to the end of sequence",
        "exact match",
    )
    return content


def _host(base_model: LoadedModel) -> dict[str, Any]:
    host: dict[str, Any] = {"system": platform.system(), "machine": platform.machine(), "device": str(base_model.device)}
    if base_model.device.type != "cpu":
        host["gpu"] = device_name(base_model.device)
    return host


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
