"""Schema 3 of eval.json, and of a cached base score.

Scores and standard errors are percent, changes are percentage points; what is undefined is null. Files of schema 2, which had one
task, are read as a list of one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anchorlora.errors import InvalidValue
from anchorlora.schemas.json import FilePart, Unreadable, checked, load
from anchorlora.scores import most_share

EVAL_FILE = "eval.json"
PROMPTS = "prompts"  # name of the task that the user's own prompts make
SCHEMA = 3
LEAST = 6  # prompts without which a gate does not pass
QUANTILE = 1.96  # standard errors on either side of a 95 % interval
REMEDY = "delete it and run `anchorlora eval` again"


class Score(FilePart):
    """A score in percent with its standard error; null where undefined."""

    score: float
    stderr: float | None


class PartScores(FilePart):
    """The scores of one task of a group on n questions, by metric."""

    n: int
    scores: dict[str, float]


class Measured(FilePart):
    """Scores of one model on one task, as its metrics give them: fractions of 1, unless a metric turns out to be none.

    Args:
        n: Number of questions.
        cut: Inputs that were longer than the model reads, cut at their beginning.
        num_fewshot: Solved examples before each question; null if the tasks of a group differ.
        metrics: Metric -> score with its standard error.
        values: Task -> metric -> value of each question; null where a question has none.
        parts: Task of a group -> its scores.
        texts: Answers to the user's own prompts, in order.
    """

    n: int
    cut: int
    num_fewshot: int | None
    metrics: dict[str, Score]
    values: dict[str, dict[str, list[float | None]]]
    parts: dict[str, PartScores] = Field(default_factory=dict)
    texts: list[str] = Field(default_factory=list)


class Change(FilePart):
    """Scores of one task of a group before and after, in percent."""

    n: int
    base: float
    after: float


class MetricChange(FilePart):
    """A metric before and after.

    Args:
        base: Score of the base model.
        after: Score with the adapter.
        change: Difference in percentage points.
        change_stderr: Standard error of the change over pairs of answers to one question; null where there are none.
    """

    base: Score
    after: Score
    change: float
    change_stderr: float | None


class Flips(FilePart):
    """How many answers changed from right to wrong, and from wrong to right."""

    right_to_wrong: int
    wrong_to_right: int


class TaskChange(FilePart):
    """A task before and after.

    Args:
        task: Name of the task or group.
        metric: Its primary metric, which the scores here are of.
        n: Number of questions.
        num_fewshot: Solved examples before each question; null if the tasks of a group differ.
        base: Score of the base model.
        after: Score with the adapter.
        change: Difference in percentage points.
        change_stderr: Standard error of the change over pairs of answers to one question; null where there are none.
        flips: Answers that changed; null if the metric gives more than right and wrong.
        metrics: Every metric that is a fraction -> its scores.
        parts: Task of a group -> both scores.
    """

    task: str
    metric: str
    n: int
    num_fewshot: int | None
    base: Score
    after: Score
    change: float
    change_stderr: float | None
    flips: Flips | None
    metrics: dict[str, MetricChange]
    parts: dict[str, Change]

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the change, in percentage points; None without a standard error."""
        if self.change_stderr is None:
            return None
        return self.change - QUANTILE * self.change_stderr, self.change + QUANTILE * self.change_stderr

    def fell(self, points: float) -> bool:
        """Return True if the score fell by more than a number of percentage points.

        Args:
            points: The number.
        """
        return self.change < -points

    def cannot_tell(self, points: float) -> str:
        """Return why the task cannot show that its score fell by no more than a number of percentage points; "" if it can.

        A score that is no higher than the number cannot fall by more. An interval that reaches as far on either side as the number
        cannot show such a fall; nor can a few questions, even where no answer changed: of n, none may show what happens to 3.7/n
        of all. The user's own prompts are no sample, and any of them counts; fewer than six show nothing.

        Args:
            points: The number.
        """
        if self.base.score <= points:
            return f"its base score is {self.base.score:.2f}, so that it cannot fall by more than {points:g} points"
        if self.fell(points) and not self.uncertain:
            return ""  # it is a drop
        if self.task == PROMPTS:
            return "" if self.n >= LEAST else f"n = {self.n} is too small to show anything; give at least {LEAST} prompts"
        half = max(100 * most_share(0, self.n), QUANTILE * (self.change_stderr or 0.0))
        if self.uncertain and self.fell(points):
            low, high = self.interval or (0.0, 0.0)
            said = f"(95 % interval of the change: {low:+.2f} to {high:+.2f})"
            return f"it fell by {-self.change:.2f} points {said}, which may be chance: n = {self.n} is too small to tell"
        if points > 0 and half > points:
            return f"n = {self.n} is too small to show a fall of {points:g} points: one of up to {half:.1f} may go unseen"
        return ""

    @property
    def uncertain(self) -> bool:
        """True if another sample of questions might as well show no drop: the 95 % interval of the change reaches 0.

        The user's own prompts are no sample: what they show is so.
        """
        return self.task != PROMPTS and self.interval is not None and self.interval[1] >= 0


class Flip(FilePart):
    """One of the user's prompts whose answer changed between right and wrong.

    Args:
        place: File and line of the prompt.
        prompt: The prompt.
        answer: The right answer.
        base: What the base model said.
        after: What it said with the adapter.
    """

    place: str
    prompt: str
    answer: str
    base: str
    after: str


class FlippedPrompts(FilePart):
    """The user's prompts whose answers changed, in both directions."""

    right_to_wrong: list[Flip]
    wrong_to_right: list[Flip]


class ModelFacts(FilePart):
    """The base model: its name, fingerprint and type."""

    name: str
    sha256: str | None
    dtype: str


class Evaluation(FilePart):
    """Capability before and after training.

    Args:
        schema_: Version of the schema, "schema" in the file.
        task: What was asked: tasks, groups and task files, joined by commas; "prompts" for the user's own.
        metric: The primary metrics, each once, joined by commas.
        limit: Questions per task, the first ones; null for all.
        num_fewshot: Solved examples that were asked for; null for each task's own number.
        apply_chat_template: True if prompts went through the tokenizer's chat template.
        n: Number of questions.
        base: Score of the base model, the mean over the tasks.
        after: Score with the adapter, the mean over the tasks.
        change: Difference in percentage points.
        change_stderr: Standard error of the change.
        tasks: Each task.
        prompts: The user's prompts whose answers changed; null if none were asked.
        cut: Inputs that were cut.
        files: Local file or folder that questions came from -> SHA-256.
        base_model: The base model.
        adapter_sha256: Hash of the adapter.
        versions: Library -> version.

    Example:
        >>> from anchorlora_lab.suites.evaluation import Change, Evaluation, Score, TaskChange
        >>> from anchorlora_lab.suites.evaluation import upgraded
        >>> law = {"n": 100, "base": 50.0, "after": 47.5}
        >>> old = {
        ...     "schema": 2, "task": "mmlu", "metric": "acc", "limit": None, "n": 100, "base": {"score": 50.0, "stderr": 5.0},
        ...     "after": {"score": 47.5, "stderr": 5.0}, "change": -2.5, "parts": {"law": law}, "few_shot": 5, "cut": 0,
        ...     "data_sha256": None, "base_model": {"name": "mini", "sha256": None, "dtype": "float32"},
        ...     "adapter_sha256": "0" * 64, "versions": {},
        ... }
        >>> found = Evaluation.model_validate(upgraded(old))
        >>> [task.task for task in found.dropped(2.0)], found.dropped(3.0)
        (['mmlu'], [])
    """

    schema_: Annotated[Literal[3], Field(alias="schema")] = 3
    task: str
    metric: str
    limit: int | None  # questions per task, the first ones
    num_fewshot: int | None
    apply_chat_template: bool
    n: int
    base: Score
    after: Score
    change: float
    change_stderr: float | None
    tasks: list[TaskChange]
    prompts: FlippedPrompts | None
    cut: int
    files: dict[str, str]
    base_model: ModelFacts
    adapter_sha256: str
    versions: dict[str, str]

    def as_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.model_dump(by_alias=True), indent=1, allow_nan=False) + "\n"

    @property
    def shots(self) -> str:
        """Solved examples before each question, as "0" or, where tasks differ, "0, 5"."""
        return ", ".join(dict.fromkeys("?" if task.num_fewshot is None else str(task.num_fewshot) for task in self.tasks))

    def dropped(self, points: float) -> list[TaskChange]:
        """Return the tasks that fell by more than a number of percentage points, and not by chance.

        Args:
            points: The number.

        Returns:
            Tasks whose score fell by more, and whose 95 % interval of the change ends below 0; where there is no interval, and for
            the user's own prompts, the drop alone counts.
        """
        return [task for task in self.tasks if task.fell(points) and not task.uncertain]

    def largest_drops(self, count: int) -> list[tuple[str, Change]]:
        """Return the tasks of groups that lost most, worst first; those that lost nothing are left out.

        Args:
            count: Largest number of them.
        """
        fallen = [(name, part) for task in self.tasks for name, part in task.parts.items() if part.after < part.base]
        return sorted(fallen, key=lambda item: item[1].after - item[1].base)[:count]


def total(scores: list[Score]) -> Score:
    """Return the mean of scores, each with the same weight.

    Args:
        scores: At least one.

    Example:
        >>> total([Score(score=50.0, stderr=3.0), Score(score=70.0, stderr=4.0)])
        Score(score=60.0, stderr=2.5)
    """
    errors = [each.stderr for each in scores if each.stderr is not None]
    error = math.hypot(*errors) / len(scores) if len(errors) == len(scores) else None
    return Score(score=sum(each.score for each in scores) / len(scores), stderr=error)


def read_evaluation(path: Path) -> Evaluation:
    """Read an eval.json.

    Args:
        path: The file.

    Raises:
        InvalidValue: It is not a valid eval.json; the message names file, field and remedy.
    """
    try:
        content = load(path)
    except Unreadable as error:
        raise InvalidValue(f"{path}: {error}; {REMEDY}") from None
    return checked(upgraded(content), Evaluation, where=str(path), remedy=REMEDY)


def upgraded(content: Any) -> Any:
    """Return the content of an eval.json of schema 2 in the shape of schema 3; anything else as it is.

    Args:
        content: Parsed JSON.

    Example:
        >>> upgraded({"schema": 2, "task": "mmlu", "few_shot": 0, "data_sha256": "ab"})["files"]
        {'mmlu': 'ab'}
    """
    if not isinstance(content, dict) or content.get("schema") != 2:
        return content
    rest = {name: value for name, value in content.items() if name not in ("parts", "few_shot", "data_sha256")}
    scores = {name: content.get(name) for name in ("base", "after", "change")} | {"change_stderr": None}
    task = {name: content.get(name) for name in ("task", "metric", "n")} | {"num_fewshot": content.get("few_shot")}
    task |= {**scores, "flips": None, "metrics": {str(content.get("metric")): scores}, "parts": content.get("parts")}
    data = content.get("data_sha256")
    rest |= {"num_fewshot": content.get("few_shot"), "apply_chat_template": False, "change_stderr": None, "prompts": None}
    return rest | {"schema": SCHEMA, "tasks": [task], "files": {} if data is None else {"mmlu": data}}
