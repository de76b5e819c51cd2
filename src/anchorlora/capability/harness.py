"""The interface to lm-evaluation-harness: tasks by name or from a folder of MMLU, and the scores of a loaded model on them.

Only this module imports lm_eval. A log-likelihood task is scored exactly as `lm_eval --model hf` scores it, with the same prompts,
tokens, and arithmetic; only the progress display, the logging, and the source of MMLU's rows differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from lm_eval.api import task as harness_task
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from anchorlora.capability import mmlu
from anchorlora.errors import InvalidValue, NotFinite, UnknownName
from anchorlora.schemas.eval import Measured, PartScore, Score

FRACTIONS = ("acc", "exact_match", "em", "acc_norm", "f1")  # metrics that are fractions of 1 in every task
SEED = 1234  # lm_eval's own, for tasks that draw their examples
BOOTSTRAP = 1000  # resamples for the standard error of metrics that are no mean


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks.

    Args:
        leaves: The tasks to evaluate, by name.
        groups: Groups that aggregate them.
        heads: The tasks or groups that were asked for, with their metric.
    """

    leaves: Mapping[str, Any]
    groups: Mapping[str, Any]
    heads: Mapping[str, str]

    @property
    def metric(self) -> str:
        """The metrics of all heads, each once, joined by commas."""
        return ",".join(dict.fromkeys(self.heads.values()))

    def sha256(self, limit: int | None) -> str:
        """Return the hash of the name, version, and questions of every leaf.

        Args:
            limit: Questions per leaf; None for all.
        """
        total = hashlib.sha256()
        for name, task in sorted(self.leaves.items()):
            total.update(f"{name} {task.VERSION}\n".encode())
            for _, row in zip(range(limit or len(task.eval_docs)), task.eval_docs, strict=False):
                total.update(json.dumps(row, sort_keys=True, default=str).encode())
        return total.hexdigest()


def tasks_of_folder(data: mmlu.Mmlu) -> Tasks:
    """Return MMLU as lm_eval defines it, with rows from disk instead of the hub.

    Args:
        data: As `read_mmlu` returns it.
    """
    group = Group.from_config(dict(mmlu.GROUP))
    leaves = {}
    with quiet():
        for subject in mmlu.SUBJECTS:
            task = _Subject(subject, {split: data.rows[split][subject] for split in mmlu.SPLITS})
            leaves[task.task_name] = task
            group.add(task)
    return Tasks(leaves, {group.name: group}, {group.name: "acc"})


def tasks_named(names: Sequence[str]) -> Tasks:
    """Load tasks that lm_eval knows.

    Args:
        names: Names of tasks, groups, or tags.

    Raises:
        UnknownName: If lm_eval has no such task; the message gives the nearest names.
        InvalidValue: If a task cannot be loaded, or cannot be scored in percent.
    """
    with quiet():
        manager = TaskManager()
        for name in names:
            if name not in manager.task_index:
                near = get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5) or ["mmlu", "hellaswag", "arc_easy"]
                raise UnknownName(f"lm_eval has no task {name!r}; nearest: {', '.join(near)}")
        loaded = {name: _load(manager, name) for name in names}
    leaves = {name: task for each in loaded.values() for name, task in each["tasks"].items()}
    groups = {name: group for each in loaded.values() for name, group in each.get("groups", {}).items()}
    heads = {}
    for name, each in loaded.items():
        summed = name in each["tasks"] or (name in groups and groups[name].has_aggregation)
        for head in [name] if summed else each["tasks"]:  # a tag is a list of tasks
            heads[head] = _metric(head, each["tasks"], groups)
    return Tasks(leaves, groups, heads)


def score(
    model: Any, tokenizer: Any, tasks: Tasks, *, limit: int | None, few_shot: int, batch: int, watch: EvalProgress
) -> Measured:
    """Score a model: each head in percent, their mean as the total, and each leaf of a group as a part.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        tasks: What to evaluate.
        limit: Questions per leaf; None for all.
        few_shot: Solved examples before each question.
        batch: Inputs per forward pass.
        watch: Told about progress.

    Raises:
        NotFinite: If the model's scores are NaN.
    """
    with quiet():
        reader = Reader(model, tokenizer, batch=batch, watch=watch)
        _set_examples(tasks, few_shot)
        whole = {"tasks": dict(tasks.leaves), "groups": dict(tasks.groups)}
        found = evaluate(reader, whole, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False)["results"]
    parts = {name: _part(found[name], metric) for name, metric in _parts(tasks).items()}
    n = sum(found[name]["sample_len"] for name in tasks.leaves)
    total = _total([(found[name], _key(found[name], metric)) for name, metric in tasks.heads.items()])
    return Measured(metric=tasks.metric, n=n, cut=reader.cut, total=total, parts=parts)


def _total(heads: Sequence[tuple[Mapping[str, Any], str]]) -> Score:
    """The mean of the heads' scores; null for an error that lm_eval does not give, as for a single question."""
    errors = [row.get(key.replace(",", "_stderr,", 1), "N/A") for row, key in heads]
    error = None if "N/A" in errors else 100 * math.hypot(*errors) / len(errors)
    return Score(score=sum(100 * row[key] for row, key in heads) / len(heads), stderr=error)


def _set_examples(tasks: Tasks, few_shot: int) -> None:
    for task in tasks.leaves.values():
        if task.get_config("num_fewshot") != 0:  # a task that sets 0 has its examples in the question
            task.set_config(key="num_fewshot", value=few_shot)
        task.set_fewshot_seed(seed=SEED)


class _Subject(ConfigurableTask):
    """A subject of MMLU whose rows are given."""

    def __init__(self, subject: str, rows: Mapping[str, list[dict[str, Any]]]) -> None:
        self.rows = rows
        super().__init__(config=mmlu.task_config(subject))

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.dataset = DatasetDict({split: Dataset.from_list(rows) for split, rows in self.rows.items()})


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        loaded = manager.load([name])
    except Exception as error:  # lm_eval's tasks and the hub's client raise what they like
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        elsewhere = "; --data reads them from a folder" if name == mmlu.NAME else ""
        raise InvalidValue(
            f"the task {name} cannot be loaded: {reason}; its data come from the Hugging Face hub unless they are cached{elsewhere}"
        ) from None
    for leaf, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise InvalidValue(f"the task {leaf} runs code that the model writes, or needs more than text; choose another")
    return loaded


def _metric(head: str, leaves: Mapping[str, Any], groups: Mapping[str, Any]) -> str:
    """The first metric of a head that is a fraction."""
    summed = groups[head].aggregate_metric_list if head in groups else ()
    known = [each.metric for each in summed] or list(leaves[head].aggregation())
    chosen = [name for name in known if name in FRACTIONS]
    if not chosen:
        raise InvalidValue(f"the task {head} cannot be scored in percent: it has {', '.join(known)}, not {', '.join(FRACTIONS)}")
    return chosen[0]


def _parts(tasks: Tasks) -> dict[str, str]:
    """The parts of the total, with their metric: the heads if there are several, and every leaf of a group."""
    parts = dict(tasks.heads) if len(tasks.heads) > 1 else {}
    for head, metric in tasks.heads.items():
        if head in tasks.groups:
            leaves = tasks.groups[head].get_all_tasks()
            parts |= {leaf.task_name: metric for leaf in leaves if metric in leaf.aggregation()}
    return parts


def _part(row: Mapping[str, Any], metric: str) -> PartScore:
    return PartScore(n=row["sample_len"], score=100 * row[_key(row, metric)])


def _key(row: Mapping[str, Any], metric: str) -> str:
    """The metric's name with its filter, as "acc,none"; the first filter that the task lists."""
    return next(name for name in row if name.startswith(f"{metric},"))


class EvalProgress:
    """A listener for progress, which does nothing by default."""

    def measures(self, what: str) -> None:
        """Called before a model is evaluated.

        Args:
            what: "without the adapter" or "with the adapter".
        """

    def begins(self, inputs: int) -> None:
        """Called before a series of inputs.

        Args:
            inputs: How many follow.
        """

    def advance(self, inputs: int) -> None:
        """Called after some inputs.

        Args:
            inputs: How many were read since the last call.
        """

    def note(self, line: str) -> None:
        """Called with what the user should know.

        Args:
            line: One line.
        """


class Reader(HFLM):
    """lm_eval's interface to a causal model, with progress reported, truncated inputs counted, and NaN refused.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        batch: Inputs per forward pass.
        watch: Told about progress.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch: int, watch: EvalProgress) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch)
        self.watch, self.cut = watch, 0

    def loglikelihood(self, requests, disable_tqdm=False):
        """Score continuations, without lm_eval's own bar.

        Args:
            requests: As lm_eval makes them.
            disable_tqdm: Ignored.
        """
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        inputs = {tuple(context + continuation[:-1]) for _, context, continuation in requests}  # read once each
        self.cut += sum(len(each) > self.max_length for each in inputs)
        self.watch.begins(len(inputs))
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def _model_call(self, inps, attn_mask=None, labels=None):
        logits = super()._model_call(inps, attn_mask=attn_mask, labels=labels)
        if torch.isnan(logits).any():
            raise NotFinite("the model's scores are NaN, so no answer is the most likely; check the adapter, or use float32")
        self.watch.advance(len(inps))
        return logits

    def generate_until(self, requests, disable_tqdm=False):
        """Generate answers, without lm_eval's own bar.

        Args:
            requests: As lm_eval makes them.
            disable_tqdm: Ignored.
        """
        self.watch.begins(len(requests))
        return super().generate_until(requests, disable_tqdm=True)

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        tokens = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self.watch.advance(len(context))
        return tokens


@contextmanager
def quiet() -> Iterator[None]:
    """Silence lm_eval and datasets, bars included, while the block runs; errors still come through."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "evaluate", "transformers", "huggingface_hub")]
    levels, bars = [logger.level for logger in loggers], harness_task.tqdm
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        harness_task.tqdm = lambda rows, total=None: rows
        yield
    finally:
        harness_task.tqdm = bars
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
