"""Schema 2 of eval.json, and of a cached base score.

Scores and standard errors are percent, changes are percentage points; what is undefined is null.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from anchorlora.schemas.json import FilePart, read_file

EVAL_FILE = "eval.json"


class Score(FilePart):
    """A score in percent with its standard error; null where undefined."""

    score: float
    stderr: float | None


class PartScore(FilePart):
    """The score of one task or subject on n questions, in percent."""

    n: int
    score: float


class Measured(FilePart):
    """What one model scored on the tasks of a request.

    Args:
        metric: Name of the metric.
        n: Number of questions.
        cut: Inputs that were longer than the model reads, cut at their beginning.
        total: Score over all tasks.
        parts: Task or subject -> score.
    """

    metric: str
    n: int  # questions
    cut: int  # inputs that were longer than the model reads, cut at their beginning
    total: Score
    parts: dict[str, PartScore]


class Change(FilePart):
    """Scores of one task or subject before and after, in percent."""

    n: int
    base: float
    after: float


class ModelFacts(FilePart):
    """The base model: its name, fingerprint and type."""

    name: str
    sha256: str | None
    dtype: str


class Evaluation(FilePart):
    """Capability before and after training.

    Args:
        schema_: Version of the schema, "schema" in the file.
        task: Task or group of tasks.
        metric: Name of the metric.
        limit: Questions per task, the first ones; null for all.
        n: Number of questions.
        base: Score of the base model.
        after: Score with the adapter.
        change: Difference in percentage points.
        parts: Task or subject -> both scores.
        few_shot: Worked examples in each prompt.
        cut: Inputs that were cut.
        data_sha256: Hash of a local folder of data; null otherwise.
        base_model: The base model.
        adapter_sha256: Hash of the adapter.
        versions: Library -> version.

    Example:
        >>> from anchorlora.schemas.eval import Change, Evaluation, ModelFacts, Score
        >>> found = Evaluation(
        ...     task="mmlu", metric="acc", limit=None, n=100, base=Score(score=50.0, stderr=5.0),
        ...     after=Score(score=47.5, stderr=5.0), change=-2.5, parts={"law": Change(n=100, base=50.0, after=47.5)}, few_shot=5,
        ...     cut=0, data_sha256=None, base_model=ModelFacts(name="mini", sha256=None, dtype="float32"),
        ...     adapter_sha256="0" * 64, versions={},
        ... )
        >>> found.dropped(2.0), found.dropped(3.0)
        (True, False)
    """

    schema_: Annotated[Literal[2], Field(alias="schema")] = 2
    task: str
    metric: str
    limit: int | None  # questions per task, the first ones
    n: int
    base: Score
    after: Score
    change: float
    parts: dict[str, Change]
    few_shot: int
    cut: int
    data_sha256: str | None  # of a local folder
    base_model: ModelFacts
    adapter_sha256: str
    versions: dict[str, str]

    def as_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.model_dump(by_alias=True), indent=1, allow_nan=False) + "\n"

    def dropped(self, points: float) -> bool:
        """Return True if the score fell by more than a number of percentage points.

        Args:
            points: The number.
        """
        return self.change < -points

    def largest_drops(self, count: int) -> list[tuple[str, Change]]:
        """Return the tasks or subjects that lost most, worst first; those that lost nothing are left out.

        Args:
            count: Largest number of them.
        """
        fallen = [(name, part) for name, part in self.parts.items() if part.after < part.base]
        return sorted(fallen, key=lambda item: item[1].after - item[1].base)[:count]


def read_evaluation(path: Path) -> Evaluation:
    """Read an eval.json.

    Args:
        path: The file.

    Raises:
        InvalidValue: It is not a valid eval.json; the message names file, field and remedy.
    """
    return read_file(path, Evaluation, remedy="delete it and run `anchorlora eval` again")
