"""predictions.jsonl: one line an evaluated example of every task so far, as they were answered after a task.

right.json: of a whole run, right and wrong answers alone, without a word of the data; `tools/collect.py` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import StringConstraints

from anchorlora.schemas.json import FilePart, read_json

REMEDY = "call the run again"
Right = dict[Literal["AA", "LA"], dict[str, Annotated[str, StringConstraints(pattern="^[01]*$")]]]  # task -> a digit an example


class Prediction(FilePart):
    """One evaluated example.

    Args:
        task: Name of its task.
        index: Its number among the task's test examples.
        prompt_sha256: SHA-256 of its prompt.
        text: What the model generated; "" where nothing was.
        label: Label that it means; None for an invalid prediction.
        gold: The right answer.
        metrics: Name of a metric -> its score, the primary one first; empty in files of earlier versions.
    """

    task: str
    index: int
    prompt_sha256: str
    text: str
    label: str | None
    gold: str
    metrics: Mapping[str, float] = {}

    @property
    def right(self) -> bool | None:
        """Whether the answer is right; None if its primary score is neither 0 nor 1."""
        primary = next(iter(self.metrics.values()), float(self.label == self.gold))
        return bool(primary) if primary in (0, 1) else None


def read_predictions(path: Path) -> Iterator[Prediction]:
    """Yield the predictions of a file, line by line.

    Args:
        path: The file.

    Raises:
        InvalidValue: A line is not a prediction; the message has file and line.

    Example:
        >>> line = '{"task": "sums", "index": 0, "prompt_sha256": "", "text": "4", "label": "4", "gold": "4"}'
        >>> _ = (tmp / "predictions.jsonl").write_text(line)
        >>> next(read_predictions(tmp / "predictions.jsonl")).right
        True
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, 1):
            yield read_json(line, Prediction, where=f"{path}, line {number}", remedy=REMEDY)
