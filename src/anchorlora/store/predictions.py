"""predictions.jsonl: one line an evaluated example of every task so far, as they were answered after a task.

right.json: of a whole run, right and wrong answers alone, without a word of the data; `tools/collect.py` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import StringConstraints

from anchorlora.store.json import FilePart, read_json

REMEDY = "call the run again"
Right = dict[Literal["AA", "LA"], dict[str, Annotated[str, StringConstraints(pattern="^[01]*$")]]]  # task -> a digit an example


class Prediction(FilePart):
    """One evaluated example."""

    task: str
    index: int  # its number among the task's test examples
    prompt_sha256: str
    text: str  # what the model generated; "" where nothing was
    label: str | None  # label that it means; None for an invalid prediction
    gold: str
    metrics: Mapping[str, float] = {}  # name of a metric -> its score, the primary one first; empty in files of earlier versions

    @property
    def right(self) -> bool | None:
        """True if the answer is right; None if its primary score is neither 0 nor 1."""
        primary = next(iter(self.metrics.values()), float(self.label == self.gold))
        return bool(primary) if primary in (0, 1) else None


def read_predictions(path: Path) -> Iterator[Prediction]:
    """Yield the predictions of a file; a line that is wrong is named."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            yield read_json(line, Prediction, where=f"{path}, line {number}", remedy=REMEDY)
