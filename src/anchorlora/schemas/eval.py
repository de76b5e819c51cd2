"""The shape of eval.json, schema 2, and of a cached base score.

Percent for scores and standard errors, percentage points for changes; what is undefined is null.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from anchorlora.schemas.json import Part, read_file

EVAL_FILE = "eval.json"


class Score(Part):
    score: float
    stderr: float | None


class PartScore(Part):
    n: int
    score: float


class Measured(Part):
    """What one model scored on the tasks of a request."""

    metric: str
    n: int  # questions
    cut: int  # inputs that were longer than the model reads, cut at their beginning
    total: Score
    parts: dict[str, PartScore]


class Change(Part):
    """One task of several, or one subject."""

    n: int
    base: float
    after: float


class ModelFacts(Part):
    name: str
    sha256: str | None
    dtype: str


class Evaluation(Part):
    """Capability before and after."""

    schema_: Annotated[Literal[2], Field(alias="schema")] = 2
    task: str
    metric: str
    limit: int | None  # questions a task, the first ones
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
        return json.dumps(self.model_dump(by_alias=True), indent=1, allow_nan=False) + "\n"

    def dropped(self, points: float) -> bool:
        """Whether the score fell by more than so many percentage points."""
        return self.change < -points

    def largest_drops(self, count: int) -> list[tuple[str, Change]]:
        """The parts that lost most, worst first; none that lost nothing."""
        fallen = [(name, part) for name, part in self.parts.items() if part.after < part.base]
        return sorted(fallen, key=lambda item: item[1].after - item[1].base)[:count]


def read_evaluation(path: Path) -> Evaluation:
    """A eval.json, validated.  Raises ValueError that names file, field and remedy."""
    return read_file(path, Evaluation, remedy="delete it and run `anchorlora eval` again")
