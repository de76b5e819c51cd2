"""The interface to lm-evaluation-harness: tasks by name, by file or from a folder of MMLU, and a model's scores on each.

A log-likelihood task is scored as `lm_eval --model hf` scores it, with the same prompts and tokens, and equal up to rounding:
inputs are read in packed rows, which read what they share once. Progress display, logging, and the source of MMLU's rows also
differ. Nothing but this module and `reader` imports lm_eval.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from anchorlora.errors import InvalidValue, MissingExtra, UnknownName, message_of
from anchorlora.paths import expanded
from anchorlora_lab.suites import mmlu
from anchorlora_lab.suites.evaluation import PartScores, Score, TaskScores
from anchorlora_lab.suites.questions import EvalProgress, Questions, is_file
from anchorlora_lab.suites.reader import Reader, quiet

NOT_FRACTIONS = {  # names of lm_eval's metrics and aggregations that are on other scales
    *("perplexity", "word_perplexity", "byte_perplexity", "weighted_perplexity", "bits_per_byte", "likelihood"),
    *("bypass", "bypass_agg"),
    *("bleu", "chrf", "chrf++", "chrfpp", "ter", "brier_score", "mcc", "matthews_corrcoef"),
}
IFEVAL = ("langdetect", "immutabledict", "nltk")  # what its checks of an answer need
SEED = 1234  # lm_eval's own, for tasks that draw their examples
BOOTSTRAP = 1000  # resamples for the standard error of metrics that are no mean


@dataclass(frozen=True)
class HarnessTask:
    """A task or group of lm_eval that was asked for."""

    name: str
    leaves: Mapping[str, Any]  # the tasks in it, by name; one, for a task
    groups: Mapping[str, Any]  # the groups in it, by name; none, for a task
    metrics: tuple[str, ...]  # its metrics that may be fractions, in its own order

    def key(self, model: Any, tokenizer: Any, questions: Questions) -> dict[str, Any]:
        """Return everything about the questions that a score depends on, for the cache."""
        with quiet():
            self._build(Reader(model, tokenizer, batch=questions.batch, watch=EvalProgress()), questions)
        total = hashlib.sha256()
        for name, task in sorted(self.leaves.items()):
            # the number of examples is in the requests, and in the key
            config = json.dumps({**task.dump_config(), "num_fewshot": None}, sort_keys=True, default=str)
            total.update(f"{name} {task.VERSION} {re.sub(r'0x[0-9a-f]+', '', config)}\n".encode())
            for instance in task.instances:
                total.update(json.dumps([instance.args, instance.doc], sort_keys=True, default=str).encode())
        settings = {name: getattr(questions, name) for name in ("limit", "num_fewshot", "apply_chat_template", "batch")}
        return {"task": self.name, "requests": total.hexdigest(), **settings}

    def score(self, model: Any, tokenizer: Any, questions: Questions, *, watch: EvalProgress) -> TaskScores:
        """Return the scores of a model, with the value of every question."""
        with quiet():
            reader = Reader(model, tokenizer, batch=questions.batch, watch=watch)
            self._set_examples(questions)
            tasks = {"tasks": dict(self.leaves), "groups": dict(self.groups)}
            results = evaluate(reader, tasks, bootstrap_iters=BOOTSTRAP, **_request_options(questions))
        return self._measured(results, cut=reader.cut)

    def _build(self, reader: Reader, questions: Questions) -> None:
        self._set_examples(questions)
        own = {"chat_template": None, "tokenizer_name": ""}
        if questions.apply_chat_template:
            own = {"chat_template": reader.apply_chat_template, "tokenizer_name": reader.tokenizer_name}
        for name, task in self.leaves.items():
            try:
                task.build_all_requests(rank=0, world_size=1, **_request_options(questions), **own)
            except Exception as error:  # a task and a chat template are programs and raise what they like
                raise InvalidValue(f"the task {name} cannot be asked in this way: {message_of(error)}") from None

    def _set_examples(self, questions: Questions) -> None:
        for task in self.leaves.values():
            own = task.get_config("num_fewshot")
            if own != 0:  # a task that sets 0 has its examples in the question
                task.set_config(key="num_fewshot", value=(own or 0) if questions.num_fewshot is None else questions.num_fewshot)
            task.set_fewshot_seed(seed=SEED)  # each time anew: building requests draws from it

    def _measured(self, results: Mapping[str, Any], *, cut: int) -> TaskScores:
        rows, row = results["results"], results["results"][self.name]
        keys = self._keys(row)
        shots = {task.get_config("num_fewshot") for task in self.leaves.values()}
        return TaskScores(
            n=row["sample_len"],
            cut=cut,
            num_fewshot=shots.pop() if len(shots) == 1 else None,
            # null for an error that lm_eval does not give, as for a single question
            metrics={_shown(k): Score(score=float(row[k]), stderr=_number(row.get(k.replace(",", "_stderr,", 1)))) for k in keys},
            values={leaf: _values(results["samples"][leaf], keys) for leaf in self.leaves},
            parts={leaf: self._part(rows[leaf]) for leaf in self.leaves} if self.groups else {},
        )

    def _part(self, row: Mapping[str, Any]) -> PartScores:
        return PartScores(n=row["sample_len"], scores={_shown(key): float(row[key]) for key in self._keys(row)})

    def _keys(self, row: Mapping[str, Any]) -> list[str]:
        """Metric and filter, as "acc,none", of every metric with a finite score; in the order of the metrics."""
        keys = [key for metric in self.metrics for key in row if key.partition(",")[0] == metric]
        return [key for key in keys if _number(row[key]) is not None]


def _request_options(questions: Questions) -> dict[str, Any]:
    template = questions.apply_chat_template  # turns for examples, as lm_eval's own command line
    return {"limit": questions.limit, "apply_chat_template": template, "fewshot_as_multiturn": template}


def task_of_folder(data: mmlu.Mmlu) -> HarnessTask:
    """Return MMLU as lm_eval defines it, with rows from disk instead of the hub."""
    group = Group.from_config(dict(mmlu.GROUP))
    leaves = {}
    with quiet():
        for subject in mmlu.SUBJECTS:
            task = _Subject(subject, {split: data.rows[split][subject] for split in mmlu.SPLITS})
            leaves[task.task_name] = task
            group.add(task)
    return HarnessTask(group.name, leaves, {group.name: group}, ("acc",))


def tasks_asked(questions: Questions, *, data: mmlu.Mmlu | None = None) -> list[HarnessTask]:
    """Load the tasks that are asked for, in their order; a tag is a list of tasks."""
    wanted = [name for name in questions.tasks if data is None or name != mmlu.NAME]
    tasks_of: dict[str, list[HarnessTask]] = {} if data is None else {mmlu.NAME: [task_of_folder(data)]}
    with quiet():
        if wanted:
            manager = TaskManager() if not all(map(is_file, wanted)) else TaskManager(include_defaults=False)
            for name in wanted:
                _refuse_unknown(manager, name)
            tasks_of |= {name: list(_heads(_load(manager, name), name)) for name in wanted}
    tasks = [task for name in questions.tasks for task in tasks_of[name]]
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            raise InvalidValue(f"the task {name} is asked for {count} times; name it once")
    return tasks


def _refuse_unknown(manager: Any, name: str) -> None:
    if is_file(name):
        if not expanded(name).is_file():
            raise InvalidValue(f"there is no task file {name}; give a YAML file of lm_eval")
    elif name not in manager.task_index:
        near = get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5) or ["mmlu", "hellaswag", "arc_easy"]
        raise UnknownName(f"lm_eval has no task {name!r}; nearest: {', '.join(near)}")


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = manager.load([str(expanded(name)) if is_file(name) else name])
    except ModuleNotFoundError as error:
        package = "'anchorlora[eval]'" if error.name in IFEVAL else error.name
        raise MissingExtra(f"the task {name} needs {error.name}, which is not installed: pip install {package}") from None
    except Exception as error:  # lm_eval's tasks and the hub's client raise what they like
        raise InvalidValue(f"the task {name} cannot be loaded: {message_of(error)}; {_remedy(name)}") from None
    for leaf, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise InvalidValue(f"the task {leaf} runs code that the model writes, or needs more than text; choose another")
    return loaded


def _remedy(name: str) -> str:
    if is_file(name):
        return "a task file holds one task in lm_eval's format, and its data are at its dataset_path"
    elsewhere = "--data reads them from a folder, or " if name == mmlu.NAME else ""
    return f"its data come from the Hugging Face hub unless they are cached: {elsewhere}run once where there is a network"


def _heads(loaded: Mapping[str, Any], asked: str) -> Iterator[HarnessTask]:
    """The group, if it has a score of its own; else each task."""
    leaves, groups = loaded["tasks"], loaded.get("groups", {})
    group = groups.get(next(iter(groups), None) if is_file(asked) else asked)  # the outermost group comes first
    if group is not None and group.has_aggregation:
        named = dict.fromkeys(m.metric for m in group.aggregate_metric_list)
        yield HarnessTask(group.name, leaves, groups, _fractions(group.name, named, leaves))
        return
    for name, task in leaves.items():
        yield HarnessTask(name, {name: task}, {}, _fractions(name, task.aggregation(), {name: task}))


def _fractions(name: str, metrics: Iterable[str], leaves: Mapping[str, Any]) -> tuple[str, ...]:
    """The metrics that are better when higher and on no other known scale; their values tell whether they are fractions."""

    def may_be(metric: str) -> bool:
        """Return whether no task says that a metric is something else."""
        tasks = [task for task in leaves.values() if metric in task.aggregation()]
        scales = {metric, *(getattr(task.aggregation()[metric], "__name__", "") for task in tasks)}
        return not scales & NOT_FRACTIONS and all(task.higher_is_better().get(metric, True) for task in tasks)

    known = list(metrics)
    fractions = tuple(metric for metric in known if may_be(metric))
    if not fractions:
        raise InvalidValue(
            f"the task {name} cannot be scored in percent: no metric of it is a fraction of 1 ({', '.join(known)}); "
            "choose another task"
        )
    return fractions


def _shown(key: str) -> str:
    """A metric's name, with its filter if it has one: "acc,none" is acc."""
    return key.removesuffix(",none")


def _values(samples: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, list[float | None]]:
    """Metric -> value of each question; a metric whose values are no numbers is left out."""
    values_of = {}
    for key in keys:
        metric, _, chosen = key.partition(",")
        values = [_number(sample.get(metric)) for sample in samples if sample["filter"] == chosen]
        if any(value is not None for value in values):
            values_of[_shown(key)] = values
    return values_of


def _number(value: Any) -> float | None:
    """A finite number, numpy's included; None for anything else."""
    if isinstance(value, bool | int | float | np.number | np.bool_) and math.isfinite(value):
        return float(value)
    return None


class _Subject(ConfigurableTask):
    """A subject of MMLU whose rows are given."""

    def __init__(self, subject: str, rows: Mapping[str, list[dict[str, Any]]]) -> None:
        self.rows = rows
        super().__init__(config=mmlu.task_config(subject))

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Take the rows that were given; nothing is downloaded."""
        self.dataset = DatasetDict({split: Dataset.from_list(rows) for split, rows in self.rows.items()})
