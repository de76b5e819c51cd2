"""trace.jsonl: what training a task did to its core, one line per recorded point, from step 0 to the last optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.store.json import FilePart, Unreadable, read_json, text_of
from anchorlora.store.record import Amount, Moved

LARGEST = 2**30  # bytes
REMEDY = "delete the run directory and trace it again"


class Norms(FilePart):
    """Gradient norms of the task loss and of the penalties."""

    task: float | None
    penalties: float | None


class Moves(FilePart):
    """How far the factors have moved in the task: Frobenius norms over all layers."""

    A: Amount
    B: Amount


class Point(Moved):
    """One recorded step."""

    step: int  # optimizer step, from 0
    wrp_before: float | None  # |(A - A_pre) V| of the step as the optimizer made it
    wrp_after: float | None
    penalties: Mapping[str, float] = {}  # name -> value
    grad_norms: Norms | None = None  # gradient norms of task loss and penalties
    moves: Moves | None = None  # how far A and B have moved since the task began; None in traces of earlier versions
    layers: Mapping[str, Any] | None = None  # layer path -> the same numbers


def read_trace(path: Path, *, steps: int | None) -> tuple[Point, ...]:
    """Read the points of a trace."""
    try:
        text = text_of(path, largest=LARGEST).removesuffix("\n")
    except Unreadable as error:
        raise InvalidValue(f"{path}: {error}; {REMEDY}") from None
    lines = text.split("\n") if text else []
    places = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    points = tuple(read_json(line, Point, where=place, remedy=REMEDY) for line, place in zip(lines, places, strict=True))
    if not points or points[0].step != 0:
        raise InvalidValue(f"{path}, line 1: a trace begins at step 0; {REMEDY}")
    for place, (before, after) in zip(places[1:], pairwise(points), strict=True):
        if after.step <= before.step:
            raise InvalidValue(f"{place}: step {after.step} follows step {before.step}; {REMEDY}")
    last = points[-1].step
    if last == 0 or last != (steps or last):
        raise InvalidValue(f"{places[-1]}: the trace ends at step {last} of {steps or 'an unknown number'}; {REMEDY}")
    return points
