"""predictions.jsonl: one line an evaluated example of every task so far, as they were answered after a task.

right.json: of a whole run, right and wrong answers alone, without a word of the data; `tools/collect.py` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from pydantic import StringConstraints, TypeAdapter, ValidationError

from anchorlora.store.json import INTEGER_BITS, FilePart, read_json

REMEDY = "call the run again"
BLOCK = 10_000  # lines that are parsed together
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


PREDICTIONS = TypeAdapter(list[Prediction])


def read_predictions(path: Path) -> Iterator[Prediction]:
    """Yield the predictions of a file; a line that is wrong is named."""
    first = 1
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        while lines := list(islice(file, BLOCK)):
            places = (f"{path}, line {number}" for number, _ in enumerate(lines, first))
            one_by_one = (read_json(line, Prediction, where=at, remedy=REMEDY) for line, at in zip(lines, places, strict=True))
            yield from _together(lines) or one_by_one
            first += len(lines)


def _together(lines: Sequence[str]) -> list[Prediction] | None:
    """Predictions parsed at once, in a third of the time; None where one line may not be what `read_json` takes."""
    text = ",".join(lines)
    try:
        predictions = PREDICTIONS.validate_json(f"[{text}]")
    except ValidationError:
        return None
    # a key that is there twice counts once among what was parsed; in a string, a quotation mark has a backslash before it, and
    # before another backslash, one stands for no mark
    text = text.replace("\\\\", "__")
    keys = sum(len(one.model_fields_set) + len(one.metrics) for one in predictions)
    plain = _count_unescaped(text, ":") == keys and not any(_count_unescaped(text, after) for after in " \t\r\n")
    usual = plain and len(predictions) == len(lines)
    return predictions if usual and all(one.index.bit_length() <= INTEGER_BITS for one in predictions) else None


def _count_unescaped(text: str, after: str) -> int:
    """How many quotation marks stand before a character, less those of strings, which have a backslash before them."""
    count = text.count(f'"{after}')
    return count and count - text.count(f'\\"{after}')
