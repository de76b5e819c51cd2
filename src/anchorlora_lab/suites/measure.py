"""General capability before and after training: a base model's score on public tasks, without and with a trained adapter.

    base    the base model alone, measured once and cached
    after   the same base model with the adapter on it, through plain PEFT
    change  after - base, in percentage points, with its standard error over pairs of answers

The harness is EleutherAI's lm-evaluation-harness, an extra of this package (`anchorlora[eval]`); the user's own prompts need none.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from anchorlora.adapters import attach
from anchorlora.adapters.files import read_adapter
from anchorlora.config import BaseModelSettings
from anchorlora.devices import device_name
from anchorlora.errors import InvalidValue, MissingExtra
from anchorlora.models.load import LoadedModel, ends_of, fingerprint_of, load_base_model, same_files, tokenizer_of
from anchorlora.models.tokenizer import TOKENIZER_CONFIG
from anchorlora.models.trust import asked_for
from anchorlora.paths import expanded
from anchorlora.store.adapter_config import adapter_sha256
from anchorlora.store.artifact import artifact_in
from anchorlora.store.files import write_text
from anchorlora.store.json import FilePart, read_file
from anchorlora.store.run_folder import TOKENIZER
from anchorlora.store.seal import sha256
from anchorlora_lab.suites import mmlu
from anchorlora_lab.suites.evaluation import EVAL_FILE, PROMPTS, Evaluation, ModelFacts, Score, TaskScores, read_evaluation, total
from anchorlora_lab.suites.paired import task_change
from anchorlora_lab.suites.prompts import OwnPrompts, read_prompts
from anchorlora_lab.suites.questions import EvalProgress, Questions, is_file

HARNESS = "lm_eval"
PACKAGES = ("transformers", "torch")


@dataclass(frozen=True)
class EvalTarget:
    """An adapter to evaluate, and the base model beneath it."""

    home: Path  # the folder for eval.json
    adapter: Path
    base_model: BaseModelSettings  # how its base model is loaded
    trained_on: str | None = None  # hash of the base model that a run was trained on, if known

    @property
    def adapter_sha256(self) -> str:
        """Hash of the adapter's files."""
        return adapter_sha256(self.adapter)

    @property
    def tokenizer_files(self) -> dict[str, str]:
        """SHA-256 of each file of a tokenizer beside the adapter, and of a chat template that was named."""
        own = (self.adapter / TOKENIZER_CONFIG).is_file()
        hashes = {f"adapter/{p.name}": sha256(p) for pattern in TOKENIZER for p in self.adapter.glob(pattern) if own}
        named = self.base_model.chat_template
        return hashes | ({str(named): sha256(expanded(named))} if named and expanded(named).is_file() else {})


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
    """Evaluate a run or an adapter before and after training, and write eval.json there; one that answers the same request is
    returned.
    """
    target = target_of(folder, model=model, trust_remote_code=trust_remote_code)
    inputs = _local_inputs(questions, target)
    path = target.home / EVAL_FILE
    if path.exists() and not force:
        return _same_request(path, target, questions, inputs)
    if not os.access(target.home, os.W_OK):
        raise InvalidValue(f"{target.home} cannot be written to, and {EVAL_FILE} belongs there; copy the folder first")
    _refuse_missing_template(target, questions, inputs)
    evaluation = _measure(target, questions, inputs, cache, watch)
    write_text(path, evaluation.as_json())
    return evaluation


@dataclass(frozen=True)
class LocalInputs:
    """Rows, prompts and hashes of the local files that a request names."""

    rows: mmlu.Mmlu | None  # MMLU's rows, if they come from a folder
    prompts: OwnPrompts | None
    files: Mapping[str, str]  # name -> SHA-256 of each folder and file that was named, and of the adapter's tokenizer


def _measure(target: EvalTarget, questions: Questions, inputs: LocalInputs, cache: Path, watch: Any) -> Evaluation:
    watch = watch or EvalProgress()
    harness = _harness() if questions.tasks else None
    exams: list[Any] = harness.tasks_asked(questions, data=inputs.rows) if harness else []
    exams += [inputs.prompts] if inputs.prompts else []
    base_model = _load_model(target)
    tokenizer = base_model.tokenizer

    def score(exam: Any, model: Any, what: str) -> TaskScores:
        watch.measures(f"{exam.name} {what}")
        return exam.score(model, tokenizer, questions, watch=watch)

    def base_score(exam: Any) -> TaskScores:
        packages = PACKAGES if exam is inputs.prompts else (*PACKAGES, HARNESS)
        key = ingredients(base_model, exam.key(base_model.model, tokenizer, questions), packages=packages)
        scores = base_scores(cache, key, lambda: score(exam, base_model.model, "without the adapter"), watch.note)
        task_change(exam.name, scores, scores)  # what is no fraction is refused before anything else is measured
        return scores

    before = [base_score(exam) for exam in exams]
    attached = attach(base_model.model, target.adapter)
    after = [score(exam, attached, "with the adapter") for exam in exams]
    tasks = [task_change(exam.name, *pair) for exam, *pair in zip(exams, before, after, strict=True)]
    base, now = total([task.base for task in tasks]), total([task.after for task in tasks])
    return Evaluation(
        task=questions.name,
        metric=",".join(dict.fromkeys(task.metric for task in tasks)),
        limit=questions.limit,
        num_fewshot=questions.num_fewshot,
        apply_chat_template=questions.apply_chat_template,
        n=sum(task.n for task in tasks),
        base=base,
        after=now,
        change=now.score - base.score,
        change_stderr=total([Score(score=task.change, stderr=task.change_stderr) for task in tasks]).stderr,
        tasks=tasks,
        prompts=inputs.prompts.flipped(before[-1], after[-1]) if inputs.prompts else None,
        cut=sum(scores.cut for scores in after),
        files=dict(inputs.files),
        base_model=ModelFacts(name=base_model.name, sha256=base_model.sha256, dtype=base_model.dtype),
        adapter_sha256=target.adapter_sha256,
        versions={name: metadata.version(name) for name in ([HARNESS] if harness else []) + [*PACKAGES, "anchorlora"]},
    )


def target_of(folder: Path, *, model: str | None = None, trust_remote_code: str | None = None) -> EvalTarget:
    """Return what is measured: a finished run with the adapter of its last task, one of its tasks, or a saved adapter."""
    artifact = artifact_in(folder)
    if artifact.kind == "run" and artifact.run and artifact.record is None:
        raise InvalidValue(
            f"the run in {folder} is not finished; continue with anchorlora run {artifact.run.config_file} --out {folder}, or give "
            "one of its tasks"
        )
    read_adapter(artifact.adapter, beside={})
    settings, where = artifact.base_model(model), artifact.named_in(model)
    if not settings.model:
        raise InvalidValue(f"{where} names no base model; give one with --model")
    settings = asked_for(settings, trust_remote_code, where=where)
    return EvalTarget(folder, artifact.adapter, settings, artifact.record.base_model.sha256 if artifact.record else None)


def _local_inputs(questions: Questions, target: EvalTarget) -> LocalInputs:
    if questions.data is not None and mmlu.NAME not in questions.tasks:
        raise InvalidValue(
            f"--data takes the rows of {mmlu.NAME} from a folder, and the task is {questions.name}; add {mmlu.NAME}, or leave out "
            "--data"
        )
    rows = mmlu.read_mmlu(expanded(questions.data)) if questions.data else None
    prompts = read_prompts(questions.prompts) if questions.prompts else None
    files = target.tokenizer_files | ({mmlu.NAME: rows.sha256} if rows else {})
    own = [file for file in map(expanded, filter(is_file, questions.tasks)) if file.is_file()]
    names = Counter(file.name for file in own)
    files |= {file.name if names[file.name] == 1 else str(file): sha256(file) for file in own}
    return LocalInputs(rows, prompts, files | ({PROMPTS: prompts.sha256} if prompts else {}))


def _same_request(path: Path, target: EvalTarget, questions: Questions, inputs: LocalInputs) -> Evaluation:
    kept = read_evaluation(path)
    pairs = {
        "task": (kept.task, questions.name),
        **{name: (getattr(kept, name), getattr(questions, name)) for name in ("limit", "num_fewshot", "apply_chat_template")},
        **{f"the file {name}": (kept.files.get(name), inputs.files.get(name)) for name in {**kept.files, **inputs.files}},
        "model": (kept.base_model.name, target.base_model.model),
        "adapter": (kept.adapter_sha256, target.adapter_sha256),
    }
    if (now := fingerprint_of(target.base_model)) and kept.base_model.sha256:
        pairs["files of the model"] = (kept.base_model.sha256, now)
    other = [f"{name}: {_short(there)} there, {_short(asked)} asked" for name, (there, asked) in pairs.items() if there != asked]
    if other:
        raise InvalidValue(f"{path} answers another request ({'; '.join(other)}); replace it with --force, or move it away")
    return kept


def _short(value: object) -> str:
    return "none" if value is None else value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def _refuse_missing_template(target: EvalTarget, questions: Questions, inputs: LocalInputs) -> None:
    chats = inputs.prompts is not None and inputs.prompts.are_chats
    if not (chats or questions.apply_chat_template):
        return
    settings = target.base_model
    if not tokenizer_of(settings, adapter=target.adapter).chat_template:
        why = "the prompts are chats" if chats else "--apply-chat-template needs one"
        remedy = "give prompts as plain text" if chats else "leave it out"
        raise InvalidValue(f"the tokenizer of {settings.model} has no chat template, and {why}; {remedy}, or choose a chat model")


def _harness() -> Any:
    if find_spec(HARNESS) is None:
        raise MissingExtra(
            "tasks of lm-evaluation-harness need it, and it is not installed: pip install 'anchorlora[eval]'; --prompts do not"
        )
    try:
        from anchorlora_lab.suites import harness
    except ImportError as error:
        raise MissingExtra(f"the installed lm_eval does not fit ({error}): pip install 'anchorlora[eval]'") from None
    return harness


def _load_model(target: EvalTarget) -> LoadedModel:
    settings = target.base_model
    base_model = load_base_model(settings, adapter=target.adapter)
    if same_files(target.trained_on, base_model.sha256) is False:
        raise InvalidValue(
            f"the model {settings.model} is not the one that {target.home} was trained on: their hashes differ; put its files "
            "back, or give that one with --model"
        )
    return base_model


def ingredients(base_model: LoadedModel, asked: dict[str, Any], *, packages: Sequence[str]) -> dict[str, Any]:
    """Return everything that a base model's score depends on, as the key of the cache."""
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    device = cpu if base_model.device.type == "cpu" else device_name(base_model.device)
    versions = {name: metadata.version(name) for name in packages}
    stops = list(ends_of(base_model.model))  # with those of the adapter's tokenizer, which other adapters need not have
    return {"model": base_model.sha256, "dtype": base_model.dtype, "device": device, "stops": stops, **asked, "versions": versions}


class CachedScores(FilePart):
    """A file of the cache."""

    key: dict[str, Any]
    measured: TaskScores


def base_scores(cache: Path, key: dict[str, Any], measure: Callable[[], TaskScores], note: Callable[[str], None]) -> TaskScores:
    """Return the cached scores under a key; measure them if they are missing or damaged, or if the model has no hash."""
    if key["model"] is None:
        note("the base score is not cached: the model's files have no known hash")
        return measure()
    path = cache_file(cache, key)
    if path.exists():
        try:
            kept: CachedScores = read_file(path, CachedScores, remedy="")
            return kept.measured
        except ValueError:
            note(f"{path} is damaged; measuring the base score again")
    scores = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(CachedScores(key=key, measured=scores).model_dump(), indent=1) + "\n")
    except OSError as error:
        note(f"the base score is not cached: {error.strerror}: {path}")
    return scores


def cache_file(cache: Path, key: dict[str, Any]) -> Path:
    """Return the file of a key."""
    return cache / f"eval-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.json"


def cache_folder() -> Path:
    """The folder `anchorlora` in the user's cache directory."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if Path(named).is_absolute():
        return Path(named) / "anchorlora"
    try:
        return Path.home() / ".cache" / "anchorlora"
    except RuntimeError:  # a container's user has no home
        return Path(tempfile.gettempdir()) / "anchorlora"
