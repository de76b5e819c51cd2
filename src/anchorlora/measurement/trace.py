"""A trace constrains nothing: it records how a task moves on its core, one JSON line per recorded step.

List it last, so that it measures what the other constraints left. Recorded steps are round(linspace(0, steps, points)), both ends
included. The ratios of step 0, where nothing has moved, are null. docs/reference.md lists the fields: drift, violation of the step
on the core before and after projection, values of penalties, gradient norms of the task loss and of the penalties, and how far
each factor has moved.
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
from anchorlora.measurement.conditions import StepMoves, together
from anchorlora.measurement.drift import measure


@dataclass(frozen=True)
class Trace:
    """Record the drift during a task into a JSON Lines file. A constraint that constrains nothing; list it last.

    Args:
        path: The file that lines are appended to.
        steps: Optimizer steps of the task, not micro-batches.
        points: Number of recorded steps, both ends included; at least 2.
        task: Number of the task, written into every line.
        per_layer: Whether each line holds the drift of every layer as well.
        check: Called before each line is written; raises where the file must not be written any more.

    Example:
        >>> import json
        >>> from anchorlora import Anchor, ProjectDisplacement, protect
        >>> from anchorlora.measurement import Trace
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW(trained)
        >>> path = tmp / "trace.jsonl"
        >>> trace = Trace(path, steps=4, points=3)
        >>> with protect(optimizer, anchor, [ProjectDisplacement("A"), trace]):
        ...     for _ in range(4):
        ...         for p in trained:
        ...             p.grad = torch.randn_like(p)  # loss.backward() in a real loop
        ...         optimizer.step()
        >>> [json.loads(line)["step"] for line in path.read_text().splitlines()]
        [0, 2, 4]
    """

    path: Path | str
    steps: int
    points: int = 64
    task: int = 2
    per_layer: bool = False
    check: Callable[[], None] = lambda: None
    first_task = 2
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to record.

        Args:
            anchor: The task's anchor, with cores.
        """
        return _Tracing(self, anchor)

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return nothing: later tasks need to know nothing.

        Args:
            anchor: The anchor of the finished task.
        """
        return {}

    def recorded(self) -> list[int]:
        """Return the recorded steps, in order."""
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
        self.others = [c for c in active if c is not self]

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
        """Return True if the step that is being made will be recorded."""
        return self.step + 1 in self.at

    def moved(self, name: str) -> float:
        """Norm of what a factor has moved in this task, over all layers."""
        pairs = [(layer.current.whole(), layer.start.whole()) for layer in self.anchor.layers]
        return _norm([in_float64(getattr(now, name).detach()) - in_float64(getattr(start, name)) for now, start in pairs])

    def gradients_now(self) -> list[Tensor]:
        factors = [layer.factor(name) for layer in self.anchor.layers for name in ("A", "B")]
        return [p.grad for p in factors if p.grad is not None]

    def write(self) -> None:
        drift = measure(self.anchor)
        penalties = {name: value for c in self.others for name, value in c.readings().items()} if self.step else {}
        line: dict[str, Any] = {"task": self.trace.task, "step": self.step, **drift.as_dict(), **self.violations}
        line |= {"penalties": penalties, "grad_norms": dict(self.norms), "moves": {name: self.moved(name) for name in ("A", "B")}}
        if self.trace.per_layer:
            line["layers"] = {layer: layer_drift.as_dict() for layer, layer_drift in drift.layers.items()}
        self.trace.check()
        with Path(self.trace.path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in parts))
