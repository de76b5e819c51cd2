"""general.json: a score of general capability before and after a run, in percent.  It lies beside the record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from anchorlora.reports.strict import Part, read_json

GENERAL_FILE = "general.json"


class Score(Part):
    score: float
    stderr: float | None


class Subject(Part):
    n: int
    base: float
    after: float


class General(Part):
    """One task of an evaluation harness, such as mmlu.  change = after - base, percentage points; n: questions.

    Fields that no table needs are passed over.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    schema_: Annotated[Literal[1], Field(alias="schema")]
    task: str
    metric: str
    limit: int | None
    n: int
    base: Score
    after: Score
    change: float
    parts: Mapping[str, Subject] = {}
    few_shot: int | None = None  # solved examples before a question
    data_sha256: str | None = None  # of a local folder of questions
    versions: Mapping[str, str] = {}


def read_general(folder: Path) -> General | None:
    """What `anchorlora general` wrote into a run directory, if it ran.  Raises ValueError for a file that is none of its own."""
    path = folder / GENERAL_FILE
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    return read_json(text, General, where=str(path), remedy="delete it and run `anchorlora general` again")
