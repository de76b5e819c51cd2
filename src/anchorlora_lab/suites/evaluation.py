"""Schema 3 of eval.json, and of a cached base score.

Scores and standard errors are percent, changes are percentage points; what is undefined is null. Files of schema 2, which had one
task, are read as a list of one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anchorlora.errors import InvalidValue
from anchorlora.scores import most_share
from anchorlora.store.json import FilePart, Unreadable, checked, load

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


class TaskScores(FilePart):
    """Scores of one model on one task, as its metrics give them: fractions of 1, unless a metric turns out to be none."""

    n: int
    cut: int  # inputs that were longer than the model reads, cut at their beginning
    num_fewshot: int | None  # solved examples before each question; null if the tasks of a group differ
    metrics: dict[str, Score]  # metric -> score with its standard error
    values: dict[str, dict[str, list[float | None]]]  # task -> metric -> value of each question; null where a question has none
    parts: dict[str, PartScores] = Field(default_factory=dict)  # task of a group -> its scores
    texts: list[str] = Field(default_factory=list)  # answers to the user's own prompts, in order


class Change(FilePart):
    """Scores of one task of a group before and after, in percent."""

    n: int
    base: float
    after: float


class MetricChange(FilePart):
    """A metric before and after."""

    base: Score
    after: Score  # score with the adapter
    change: float  # difference in percentage points
    change_stderr: float | None  # standard error of the change over pairs of answers to one question; null where there are none


class Flips(FilePart):
    """How many answers changed from right to wrong, and from wrong to right."""

    right_to_wrong: int
    wrong_to_right: int


class TaskChange(FilePart):
    """A task before and after."""

    task: str  # name of the task or group
    metric: str  # its primary metric, which the scores here are of
    n: int
    num_fewshot: int | None  # solved examples before each question; null if the tasks of a group differ
    base: Score
    after: Score  # score with the adapter
    change: float  # difference in percentage points
    change_stderr: float | None  # standard error of the change over pairs of answers to one question; null where there are none
    flips: Flips | None  # answers that changed; null if the metric gives more than right and wrong
    metrics: dict[str, MetricChange]  # every metric that is a fraction -> its scores
    parts: dict[str, Change]  # task of a group -> both scores

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the change, in percentage points; None without a standard error."""
        if self.change_stderr is None:
            return None
        return self.change - QUANTILE * self.change_stderr, self.change + QUANTILE * self.change_stderr

    @property
    def fall(self) -> str:
        """How far the score fell, in words; with the interval, which own prompts lack, since they are not a sample."""
        fall = f"fell by {-self.change:.2f} points"
        if self.interval is None or self.task == PROMPTS:
            return fall
        return f"{fall} (95 % interval of the change: {self.interval[0]:+.2f} to {self.interval[1]:+.2f})"

    def fell(self, points: float) -> bool:
        """Return True if the score fell by more than a number of percentage points."""
        return self.change < -points

    def cannot_tell(self, points: float) -> str:
        """Return why the task cannot show that its score fell by no more than some points; "" if it can. The base score may be no
        higher than that, the interval may reach as far on either side, or there are too few questions (an event that none of n
        shows may happen in 3.7/n of all) or fewer than six own prompts, which are not a sample.
        """
        if self.base.score <= points:
            return f"its base score is {self.base.score:.2f}, so that it cannot fall by more than {points:g} points"
        if self.fell(points) and not self.uncertain:
            return ""  # it is a drop
        if self.task == PROMPTS:
            return "" if self.n >= LEAST else f"n = {self.n} is too small to show anything; give at least {LEAST} prompts"
        half = max(100 * most_share(0, self.n), QUANTILE * (self.change_stderr or 0.0))
        if self.uncertain and self.fell(points):
            return f"it {self.fall}, which may be chance: n = {self.n} is too small to tell"
        if points > 0 and half > points:
            return f"n = {self.n} is too small to show a fall of {points:g} points: one of up to {half:.1f} may go unseen"
        return ""

    @property
    def uncertain(self) -> bool:
        """True if another sample of questions might show no drop: the 95 % interval of the change reaches 0. Own prompts are not a
        sample.
        """
        return self.task != PROMPTS and self.interval is not None and self.interval[1] >= 0


class Flip(FilePart):
    """One of the user's prompts whose answer changed between right and wrong."""

    place: str  # file and line of the prompt
    prompt: str
    answer: str
    base: str  # what the base model said
    after: str  # what it said with the adapter


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
    """Capability before and after training."""

    schema_: Annotated[Literal[3], Field(alias="schema")] = 3  # version of the schema, "schema" in the file
    task: str  # what was asked: tasks, groups and task files, joined by commas; "prompts" for the user's own
    metric: str  # the primary metrics, each once, joined by commas
    limit: int | None  # questions per task, the first ones
    num_fewshot: int | None  # solved examples that were asked for; null for each task's own number
    apply_chat_template: bool  # True if prompts went through the tokenizer's chat template
    n: int
    base: Score  # score of the base model, the mean over the tasks
    after: Score  # score with the adapter, the mean over the tasks
    change: float  # difference in percentage points
    change_stderr: float | None
    tasks: list[TaskChange]
    prompts: FlippedPrompts | None  # the user's prompts whose answers changed; null if none were asked
    cut: int  # inputs that were cut
    files: dict[str, str]  # local file or folder that questions came from, or of the adapter's tokenizer -> SHA-256
    base_model: ModelFacts
    adapter_sha256: str
    versions: dict[str, str]  # library -> version

    @property
    def shots(self) -> str:
        """Solved examples before each question, as "0" or, where tasks differ, "0, 5"."""
        return ", ".join(dict.fromkeys("?" if task.num_fewshot is None else str(task.num_fewshot) for task in self.tasks))

    def dropped(self, points: float) -> list[TaskChange]:
        """Return the tasks that fell by more than a number of percentage points, and not by chance."""
        return [task for task in self.tasks if task.fell(points) and not task.uncertain]

    def largest_drops(self, count: int) -> list[tuple[str, Change]]:
        """Return the tasks of groups that lost most, worst first; those that lost nothing are left out."""
        fallen = [(name, part) for task in self.tasks for name, part in task.parts.items() if part.after < part.base]
        return sorted(fallen, key=lambda item: item[1].after - item[1].base)[:count]


def total(scores: list[Score]) -> Score:
    """Return the mean of scores, each with the same weight."""
    errors = [s.stderr for s in scores if s.stderr is not None]
    error = math.hypot(*errors) / len(scores) if len(errors) == len(scores) else None
    return Score(score=sum(s.score for s in scores) / len(scores), stderr=error)


def read_evaluation(path: Path) -> Evaluation:
    """Read an eval.json."""
    try:
        content = load(path)
    except Unreadable as error:
        raise InvalidValue(f"{path}: {error}; {REMEDY}") from None
    return checked(upgraded(content), Evaluation, where=str(path), remedy=REMEDY)


def upgraded(content: Any) -> Any:
    """Return the content of an eval.json of schema 2 in the shape of schema 3; anything else as it is."""
    if not isinstance(content, dict) or content.get("schema") != 2:
        return content
    rest = {name: value for name, value in content.items() if name not in ("parts", "few_shot", "data_sha256")}
    scores = {name: content.get(name) for name in ("base", "after", "change")} | {"change_stderr": None}
    task = {name: content.get(name) for name in ("task", "metric", "n")} | {"num_fewshot": content.get("few_shot")}
    task |= {**scores, "flips": None, "metrics": {str(content.get("metric")): scores}, "parts": content.get("parts")}
    data = content.get("data_sha256")
    rest |= {"num_fewshot": content.get("few_shot"), "apply_chat_template": False, "change_stderr": None, "prompts": None}
    return rest | {"schema": SCHEMA, "tasks": [task], "files": {} if data is None else {"mmlu": data}}
