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
ELSEWHERE: Any = {"name": True, "trace": True, "tasks": {"orders", "data"}, "base_model": {"model", "revision"}}


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
    content = config.recipe.model_dump(mode="json", exclude=ELSEWHERE)
    if config.recipe.base_model.quantized is None:
        del content["base_model"]["quantized"]  # a record of full precision says no more than it ever did
    if config.recipe.training.batching == "padded":
        del content["training"]["batching"], content["training"]["row_tokens"]
    if config.recipe.evaluation.backend == "transformers":
        del content["evaluation"]["backend"]
    if not config.recipe.training.gradient_checkpointing:
        del content["training"]["gradient_checkpointing"]
    if config.recipe.training.warmup == 0:
        del content["training"]["warmup"]
    if config.recipe.base_model.chat_template is None:
        del content["base_model"]["chat_template"]
    del content["start"]
    if began := start_files(config.recipe.start):
        content["start"] = {name: sha256(path) for name, path in began.items()}
    if inputs.processes.count > 1:
        content["processes"] = inputs.processes.count
        content["sharded"] = inputs.processes.sharded
    if config.recipe.training.batching == "packed" and inputs.unpacked is not None:
        content["unpacked"] = inputs.unpacked
    if config.recipe.base_model.trust_remote_code is None:
        del content["base_model"]["trust_remote_code"]
    counts = {name: {"train": len(inputs.data.train[name]), "test": len(inputs.data.test[name])} for name in inputs.order}
    cut = {name: inputs.data.train[name].cut + inputs.data.test[name].cut for name in inputs.order}
    content["examples"], content["passages_cut"] = counts, cut
    for key, counted in (("unknown_in_prompts", "unknown"), ("prompts_inside_a_token", "split")):
        parts = {name: [getattr(split[name], counted) for split in (inputs.data.train, inputs.data.test)] for name in inputs.order}
        if found := {name: sum(part) for name, part in parts.items() if sum(part)}:
            content[key] = found
    content["own_wording"] = sorted(
        {task.group for task in inputs.data.tasks.values() if isinstance(task, Task) and task.instruction == OWN_WORDING}
    )
    content["test_labels_not_listed"] = {
        name: odd
        for name in inputs.order
        if inputs.data.tasks[name].labels
        if (odd := sum(label not in inputs.data.tasks[name].labels for label in inputs.data.test[name].labels))
    }
    if config.settings:
        content["tuned"], content["selection"] = config.settings, config.selection
    if config.recipe.tasks.tested_on == "holdout":
        content["holdout_sha256"] = fingerprint({name: [e.example for e in test] for name, test in inputs.data.test.items()})
    if config.recipe.trace.trace_points:
        content["task1_state"] = directory.fingerprint(1, config.order[0])
    if inexact := directory.provenance.inexact():
        content["inexact"] = inexact
    content["optimizer"], content["decoding"], content["metric"] = (
        "AdamW, fresh for each task",
        "greedy, to the end of sequence",
        _metrics(inputs),
    )
    return content


def _labels(inputs: RunInputs) -> Labels:
    """How often each label stands in what the run reads: what guessing and the most frequent label would reach follows from it."""
    counts: Labels = {}
    for name in inputs.order:
        train, test = Counter(inputs.data.train[name].labels), Counter(inputs.data.test[name].labels)
        counts[name] = {
            label: LabelCount(train=train[label[:LONGEST_LABEL]], test=test[label[:LONGEST_LABEL]])
            for label in inputs.data.tasks[name].labels
        }
    return {name: each for name, each in counts.items() if each}


def _metrics(inputs: RunInputs) -> str | dict[str, list[str]]:
    """The metric of all tasks, or each task's, the primary one first."""
    metrics = {name: task.metrics for name, task in inputs.data.tasks.items()}
    if all(found == (ExactMatch(),) for found in metrics.values()):
        return "exact match"
    return {name: [metric.name for metric in found] for name, found in metrics.items()}


def _host(base_model: LoadedModel) -> dict[str, Any]:
    host: dict[str, Any] = {"system": platform.system(), "machine": platform.machine(), "device": str(base_model.device)}
    if base_model.device.type != "cpu":
        host["gpu"] = device_name(base_model.device)
    return host


def now() -> str:
    """Return the time as a record has it: UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
