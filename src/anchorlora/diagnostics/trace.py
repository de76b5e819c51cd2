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

from anchorlora.adapters import Scope
from anchorlora.constraints.base import Held
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
    from_task = 2
    reads = ()

    def hold(self, scope: Scope) -> Held:
        return _Tracing(self, scope)

    def remember(self, scope: Scope) -> dict[str, Tensor]:
        return {}

    def recorded(self) -> list[int]:
        """The steps that are recorded."""
        return sorted({round(i * self.steps / (self.points - 1)) for i in range(self.points)})


class _Tracing(Held):
    def __init__(self, trace: Trace, scope: Scope) -> None:
        self.trace, self.scope, self.step = trace, scope, 0
        self.at = set(trace.recorded())
        self.others: Sequence[Held] = ()
        self.norms: dict[str, float | None] = {"task": None, "penalties": None}
        self.violation: dict[str, float | None] = {"wrp_before": None, "wrp_after": None}
        self.moves = StepMoves({s.layer: (partial(s.factor, "A"), s.core) for s in scope.sites if s.core is not None})
        self.gradients: list[Tensor] = []

    def meet(self, held: Sequence[Held]) -> None:
        self.others = [h for h in held if h is not self]

    def begin(self, step: int) -> None:
        self.step = step
        if step == 0:
            self.write()

    def arrived(self) -> None:
        if self.due():
            self.gradients = [in_float64(g).clone() for g in self.gradients_now()]
            self.norms["task"] = _norm(self.gradients)
            self.moves.begin()

    def add_gradients(self) -> None:
        if self.due():  # listed last: the others have added theirs
            added = [in_float64(g) - before for g, before in zip(self.gradients_now(), self.gradients, strict=True)]
            self.norms["penalties"] = _norm(added)

    def moved(self) -> None:
        if self.due():
            self.violation["wrp_before"] = together(self.moves.inside())

    def after_step(self) -> None:
        if self.due():
            self.violation["wrp_after"] = together(self.moves.inside())
        self.step += 1
        if self.step in self.at:
            self.write()

    def due(self) -> bool:
        """Whether the step that is being made will be recorded."""
        return self.step + 1 in self.at

    def gradients_now(self) -> list[Tensor]:
        factors = [site.factor(name) for site in self.scope.sites for name in ("A", "B")]
        return [p.grad for p in factors if p.grad is not None]

    def write(self) -> None:
        drift = measure(self.scope)
        penalties = {name: value for h in self.others for name, value in h.readings().items()} if self.step else {}
        line: dict[str, Any] = {"task": self.trace.task, "step": self.step, **drift.as_dict(), **self.violation}
        line |= {"penalties": penalties, "grad_norms": dict(self.norms)}
        if self.trace.per_layer:
            line["layers"] = {layer: each.as_dict() for layer, each in drift.layers.items()}
        self.trace.check()
        with self.trace.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))
