"""A trace constrains nothing: it writes what a task did to its core, step by step, one JSON line a recorded point.

List it last, so that it measures what the others have left. Points stand at round(linspace(0, steps, points)), both ends
included; the ratios of step 0, where nothing has moved, are null. Fields as in docs/reference.md: drift, WRP violation of the step
before and after projection, values of penalties, gradient norms of the task loss and of the penalties.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from anchorlora.adapters import Anchor
from anchorlora.constraints.base import ActiveConstraint
from anchorlora.devices import in_float64
from anchorlora.diagnostics.conditions import StepMoves, together
from anchorlora.diagnostics.drift import measure


@dataclass(frozen=True)
class Trace:
    """Record `points` measurements over `steps` optimizer steps (not micro-batches) into the file `path`.

    check: called before each line is written; raises where the file is another's by now.
    """

    path: Path
    steps: int
    points: int = 64
    task: int = 2
    per_layer: bool = False
    check: Callable[[], None] = lambda: None
    first_task = 2
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        return _Tracing(self, anchor)

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        return {}

    def recorded(self) -> list[int]:
        """The steps that are recorded."""
        return sorted({round(i * self.steps / (self.points - 1)) for i in range(self.points)})


class _Tracing(ActiveConstraint):
    def __init__(self, trace: Trace, anchor: Anchor) -> None:
        self.trace, self.anchor, self.step = trace, anchor, 0
        self.at = set(trace.recorded())
        self.others: Sequence[ActiveConstraint] = ()
        self.norms: dict[str, float | None] = {"task": None, "penalties": None}
        self.violations: dict[str, float | None] = {"wrp_before": None, "wrp_after": None}
        self.moves = StepMoves({s.name: (partial(s.factor, "A"), s.core) for s in anchor.layers if s.core is not None})
        self.gradients: list[Tensor] = []

    def see(self, active: Sequence[ActiveConstraint]) -> None:
        self.others = [h for h in active if h is not self]

    def begin(self, step: int) -> None:
        self.step = step
        if step == 0:
            self.write()

    def after_backward(self) -> None:
        if self.due():
            self.gradients = [in_float64(g).clone() for g in self.gradients_now()]
            self.norms["task"] = _norm(self.gradients)
            self.moves.begin()

    def add_penalty_grads(self) -> None:
        if self.due():  # listed last: the others have added theirs
            added = [in_float64(g) - before for g, before in zip(self.gradients_now(), self.gradients, strict=True)]
            self.norms["penalties"] = _norm(added)

    def after_raw_update(self) -> None:
        if self.due():
            self.violations["wrp_before"] = together(self.moves.inside())

    def after_optimizer_step(self) -> None:
        if self.due():
            self.violations["wrp_after"] = together(self.moves.inside())
        self.step += 1
        if self.step in self.at:
            self.write()

    def due(self) -> bool:
        """Whether the step that is being made will be recorded."""
        return self.step + 1 in self.at

    def gradients_now(self) -> list[Tensor]:
        factors = [layer.factor(name) for layer in self.anchor.layers for name in ("A", "B")]
        return [p.grad for p in factors if p.grad is not None]

    def write(self) -> None:
        drift = measure(self.anchor)
        penalties = {name: value for h in self.others for name, value in h.readings().items()} if self.step else {}
        line: dict[str, Any] = {"task": self.trace.task, "step": self.step, **drift.as_dict(), **self.violations}
        line |= {"penalties": penalties, "grad_norms": dict(self.norms)}
        if self.trace.per_layer:
            line["layers"] = {layer: each.as_dict() for layer, each in drift.layers.items()}
        self.trace.check()
        with self.trace.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))
