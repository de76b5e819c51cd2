"""General capability before and after training: a base model's score on public tasks, without and with a trained adapter.

    base    the base model alone, measured once and cached
    after   the same base model with the adapter on it, through plain PEFT
    change  after - base, in percentage points

The harness is EleutherAI's lm-evaluation-harness, an extra of this package (`anchorlora[eval]`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from anchorlora import embedded
from anchorlora.adapters import attach
from anchorlora.adapters.files import read_adapter
from anchorlora.capability import mmlu
from anchorlora.capability.cache import BaseScores, ingredients
from anchorlora.config import BaseModelSettings
from anchorlora.errors import InvalidValue, MissingExtra
from anchorlora.models.artifact import artifact_in
from anchorlora.models.load import LoadedModel, load_base_model
from anchorlora.models.trust import asked_for
from anchorlora.schemas.eval import EVAL_FILE, Change, Evaluation, Measured, ModelFacts, read_evaluation
from anchorlora.schemas.run_folder import CONFIG_FILE, adapter_sha256
from anchorlora.schemas.text import expanded
from anchorlora.storage.files import write_text

PACKAGES = ("lm_eval", "transformers", "torch", "anchorlora")


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Args:
        home: The folder for eval.json.
        adapter: The adapter's folder.
        base_model: How its base model is loaded.
        trained_on: Hash of the base model that a run was trained on, if known.
    """

    home: Path
    adapter: Path
    base_model: BaseModelSettings
    trained_on: str | None = None

    @property
    def adapter_sha256(self) -> str:
        """Hash of the adapter's files."""
        return adapter_sha256(self.adapter)


@dataclass(frozen=True)
class Questions:
    """What is asked.

    Args:
        tasks: Names of lm_eval tasks.
        data: A local folder of MMLU; by default, data come from the hub.
        limit: Questions per task, the first ones; None for all. Of MMLU, per subject.
        few_shot: Solved examples before each question.
        batch: Inputs per forward pass; changes rounding only.

    Example:
        >>> from anchorlora.capability.measure import Questions
        >>> Questions(("hellaswag", "arc_easy"), limit=100).name
        'hellaswag,arc_easy'
    """

    tasks: tuple[str, ...] = (mmlu.NAME,)
    data: Path | None = None
    limit: int | None = None
    few_shot: int = 0
    batch: int = 8

    @property
    def name(self) -> str:
        """The tasks, joined by commas."""
        return ",".join(self.tasks)


def evaluate(
    folder: Path,
    questions: Questions,
    *,
    cache: Path,
    model: str | None = None,
    trust_remote_code: str | None = None,
    force: bool = False,
    watch: Any = None,
) -> Evaluation:
    """Evaluate a run or an adapter before and after training, and write eval.json there.

    An existing eval.json that answers the same request is returned as it is. Mistakes are reported before any model is loaded
    wherever possible.

    Args:
        folder: A finished run directory, whose last adapter is measured, or a saved adapter.
        questions: What to ask.
        cache: The folder for scores of base models.
        model: The base model; by default the one that the run or the adapter names.
        trust_remote_code: The commit whose model code may run; None runs no code and refuses a model that needs it.
        force: Measure again, and replace an existing eval.json.
        watch: Told about progress, as `harness.EvalProgress`.

    Returns:
        The content of eval.json: scores before and after, their change, and the parts.

    Raises:
        InvalidValue: If the folder is neither, or an existing eval.json answers a different request.
        UnknownName: If lm_eval has no such task.
        MissingExtra: If lm-evaluation-harness is not installed.
    """
    subject = subject_of(folder, model=model, trust_remote_code=trust_remote_code)
    rows = _rows(questions)
    place = subject.home / EVAL_FILE
    if place.exists() and not force:
        return _same_request(place, subject, questions, rows)
    if not os.access(subject.home, os.W_OK):
        raise InvalidValue(f"{subject.home} cannot be written to, and {EVAL_FILE} belongs there; copy the folder first")
    found = _measure(subject, questions, rows, cache, watch)
    write_text(place, found.as_json())
    return found


def _measure(subject: Subject, questions: Questions, rows: mmlu.Mmlu | None, cache: Path, watch: Any) -> Evaluation:
    harness = _harness()
    watch = watch or harness.EvalProgress()
    tasks = harness.tasks_of_folder(rows) if rows else harness.tasks_named(questions.tasks)
    base_model = _loaded(subject)
    data = rows.sha256 if rows else None
    settings = {"limit": questions.limit, "few_shot": questions.few_shot, "batch": questions.batch}

    def scored(model: Any, what: str) -> Measured:
        watch.measures(what)
        return harness.score(model, base_model.tokenizer, tasks, **settings, watch=watch)

    key = ingredients(base_model, {"task": questions.name, "data": data or tasks.sha256(questions.limit), **settings})
    base = BaseScores(cache).get(key, lambda: scored(base_model.model, "without the adapter"), note=watch.note)
    after = scored(attach(base_model.model, subject.adapter), "with the adapter")
    return compared(base, after, subject=subject, questions=questions, base_model=base_model, data=data)


def subject_of(folder: Path, *, model: str | None = None, trust_remote_code: str | None = None) -> Subject:
    """Return what is measured: a finished run with the adapter of its last task, one of its tasks, or a saved adapter.

    Args:
        folder: The folder.
        model: The base model, if another than the folder names.
        trust_remote_code: The commit whose model code may run.

    Raises:
        InvalidValue: If the folder holds none of these, or its files are not what was written.
    """
    found = artifact_in(folder)
    if found.kind == "run" and found.record is None:
        raise InvalidValue(
            f"the run in {folder} is not finished; go on with anchorlora run {folder / CONFIG_FILE} --out {folder}, or give one of "
            "its tasks"
        )
    read_adapter(found.adapter)
    settings, where = found.base_model(model), found.named_in(model)
    if not settings.model:
        raise InvalidValue(f"{where} names no base model; give one with --model")
    settings = asked_for(settings, trust_remote_code, where=where)
    return Subject(folder, found.adapter, settings, found.record.base_model.sha256 if found.record else None)


def compared(
    base: Measured, after: Measured, *, subject: Subject, questions: Questions, base_model: LoadedModel, data: str | None
) -> Evaluation:
    """Return two measurements as the content of eval.json.

    Args:
        base: Of the base model.
        after: Of the base model with the adapter.
        subject: What was measured.
        questions: What was asked.
        base_model: The loaded model.
        data: Hash of a local data folder, if one was used.
    """
    return Evaluation(
        task=questions.name,
        metric=after.metric,
        limit=questions.limit,
        n=after.n,
        base=base.total,
        after=after.total,
        change=after.total.score - base.total.score,
        parts={name: Change(n=p.n, base=base.parts[name].score, after=p.score) for name, p in after.parts.items()},
        few_shot=questions.few_shot,
        cut=after.cut,
        data_sha256=data,
        base_model=ModelFacts(name=base_model.name, sha256=base_model.sha256, dtype=base_model.dtype),
        adapter_sha256=subject.adapter_sha256,
        versions={name: metadata.version(name) for name in PACKAGES},
    )


def _rows(questions: Questions) -> mmlu.Mmlu | None:
    if not questions.tasks:
        raise InvalidValue("no task given; --task takes a name of lm_eval, or a comma list")
    if questions.data is None:
        return None
    if questions.tasks != (mmlu.NAME,):
        raise InvalidValue(
            f"--data takes the rows of {mmlu.NAME} from a folder, and the task is {questions.name}; give one of the two"
        )
    return mmlu.read_mmlu(expanded(questions.data))


def _same_request(place: Path, subject: Subject, questions: Questions, rows: mmlu.Mmlu | None) -> Evaluation:
    found = read_evaluation(place)
    pairs = {
        "task": (found.task, questions.name),
        "limit": (found.limit, questions.limit),
        "few_shot": (found.few_shot, questions.few_shot),
        "data": (found.data_sha256, rows.sha256 if rows else None),
        "model": (found.base_model.name, subject.base_model.model),
        "adapter": (found.adapter_sha256, subject.adapter_sha256),
    }
    other = [f"{name}: {there} there, {asked} asked" for name, (there, asked) in pairs.items() if there != asked]
    if other:
        raise InvalidValue(f"{place} answers another request ({'; '.join(other)}); replace it with --force, or move it away")
    return found


def _harness() -> Any:
    if find_spec("lm_eval") is None:
        raise MissingExtra("eval needs lm-evaluation-harness, which is not installed: pip install 'anchorlora[eval]'")
    try:
        from anchorlora.capability import harness
    except ImportError as error:
        raise MissingExtra(f"the installed lm_eval does not fit ({error}): pip install 'anchorlora[eval]'") from None
    return harness


def _loaded(subject: Subject) -> LoadedModel:
    settings = subject.base_model
    if settings.threads:
        torch.set_num_threads(settings.threads)
    base_model = load_base_model(settings, folder=embedded.folder(settings.model or "", "base_model"))
    known = (subject.trained_on, base_model.sha256)
    if None not in known and len({len(sha or "") for sha in known}) == 1 and known[0] != known[1]:
        raise InvalidValue(f"the model {settings.model} is not the one that {subject.home} was trained on: their hashes differ")
    return base_model
