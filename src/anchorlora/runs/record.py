"""The record of a finished run: what it was, what came out, and every choice that a reader could make differently."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from anchorlora.config import RunConfig
from anchorlora.continual.inputs import RunInputs
from anchorlora.data import ExactMatch, Task, fingerprint
from anchorlora.data.benchmark import OWN_WORDING
from anchorlora.data.spool import LONGEST_LABEL
from anchorlora.devices import device_name
from anchorlora.methods import Method
from anchorlora.models.load import LoadedModel
from anchorlora.runs.checkpoint import SavedResult
from anchorlora.runs.directory import RunDirectory
from anchorlora.runs.provenance import start_files, versions
from anchorlora.scores import Scores
from anchorlora.store.record import SCHEMA, LabelCount, Labels, Record, TaskResult
from anchorlora.store.seal import sha256

# fields of the recipe that a record names elsewhere, or that say nothing about how a model was made
ELSEWHERE: Any = {"name": True, "trace": True, "start": True, "tasks": {"orders", "data"}, "base_model": {"model", "revision"}}


# settings that a record names where they are another one than this: it then says no more than it ever did
UNSAID: dict[str, Any] = {
    "base_model.quantized": None,
    "base_model.chat_template": None,
    "base_model.trust_remote_code": None,
    "training.batching": "padded",
    "training.gradient_checkpointing": False,
    "training.warmup": 0,
    "evaluation.backend": "transformers",
}


def record_of(
    config: RunConfig, method: Method, inputs: RunInputs, directory: RunDirectory, results: Sequence[SavedResult], started: str
) -> Record:
    """Assemble the record of a finished run."""
    base_model, source = inputs.base_model, inputs.source
    content = {
        "schema": SCHEMA,
        "method": method.facts.model_dump(),
        "recipe": config.recipe.name,
        "base_model": base_model.facts(),
        "order": list(config.order),
        "seed": config.seed,
        "protocol": _protocol(config, inputs, directory),
        "threads": torch.get_num_threads(),
        "scores": Scores.of([result.accuracy for result in results]).as_dict(),
        "versions": versions(),
        "data": {path: {"sha256": f.sha256, "kind": f.kind} for path, f in sorted(source.opened.items())},
        "labels": _labels(inputs),
        "host": _host(base_model),
        "started": started,
        "finished": now(),
        "files": directory.files(results),
    }
    return Record.model_validate(content | TaskResult.collected(results))


def _protocol(config: RunConfig, inputs: RunInputs, directory: RunDirectory) -> dict[str, Any]:
    """Every choice that a reader could make differently."""
    recipe, data, order = config.recipe, inputs.data, inputs.data.order
    content = recipe.model_dump(mode="json", exclude=ELSEWHERE)
    for path, usual in UNSAID.items():
        part, _, name = path.partition(".")
        if content[part][name] == usual:
            del content[part][name]
    if "batching" not in content["training"]:
        del content["training"]["row_tokens"]
    if files := start_files(recipe.start):
        content["start"] = {name: sha256(path) for name, path in files.items()}
    if inputs.processes.count > 1:
        content |= {"processes": inputs.processes.count, "sharded": inputs.processes.sharded}
    if recipe.training.batching == "packed" and inputs.unpacked is not None:
        content["unpacked"] = inputs.unpacked
    content["examples"] = {name: {"train": len(data.train[name]), "test": len(data.test[name])} for name in order}
    content["passages_cut"] = {name: data.train[name].cut + data.test[name].cut for name in order}
    for key, counted in (("unknown_in_prompts", "unknown"), ("prompts_inside_a_token", "split")):
        counts = {name: getattr(data.train[name], counted) + getattr(data.test[name], counted) for name in order}
        if any(counts.values()):
            content[key] = {name: count for name, count in counts.items() if count}
    own = {task.group for task in data.tasks.values() if isinstance(task, Task) and task.instruction == OWN_WORDING}
    labels = {name: task.labels for name, task in data.tasks.items() if task.labels}
    odd = {name: sum(label not in labels[name] for label in data.test[name].labels) for name in order if name in labels}
    content |= {"own_wording": sorted(own), "test_labels_not_listed": {name: count for name, count in odd.items() if count}}
    if config.settings:
        content |= {"tuned": config.settings, "selection": config.selection}
    if recipe.tasks.tested_on == "holdout":
        content["holdout_sha256"] = fingerprint({name: [e.example for e in test] for name, test in data.test.items()})
    if recipe.trace.trace_points:
        content["task1_state"] = directory.fingerprint(1, config.order[0])
    if inexact := directory.provenance.inexact():
        content["inexact"] = inexact
    decoding = "greedy, to the end of sequence"
    return content | {"optimizer": "AdamW, fresh for each task", "decoding": decoding, "metric": _metrics(inputs)}


def _labels(inputs: RunInputs) -> Labels:
    """How often each label stands in what the run reads: what guessing and the most frequent label would reach follows from it."""
    counts: Labels = {}
    for name in inputs.data.order:
        train, test = Counter(inputs.data.train[name].labels), Counter(inputs.data.test[name].labels)
        counts[name] = {
            label: LabelCount(train=train[label[:LONGEST_LABEL]], test=test[label[:LONGEST_LABEL]])
            for label in inputs.data.tasks[name].labels
        }
    return {name: of_task for name, of_task in counts.items() if of_task}


def _metrics(inputs: RunInputs) -> str | dict[str, list[str]]:
    """The metric of all tasks, or each task's, the primary one first."""
    metrics = {name: task.metrics for name, task in inputs.data.tasks.items()}
    if all(of_task == (ExactMatch(),) for of_task in metrics.values()):
        return "exact match"
    return {name: [metric.name for metric in of_task] for name, of_task in metrics.items()}


def _host(base_model: LoadedModel) -> dict[str, Any]:
    host: dict[str, Any] = {"system": platform.system(), "machine": platform.machine(), "device": str(base_model.device)}
    if base_model.device.type != "cpu":
        host["gpu"] = device_name(base_model.device)
    return host


def now() -> str:
    """Return the time as a record has it: UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
