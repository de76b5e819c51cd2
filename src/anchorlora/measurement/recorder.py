"""Record what optimizer steps do to protected directions, one JSON line per recorded step; nothing is constrained.

`Trace` follows a task of a run at some of its steps: its drift, penalties, gradients and moves. `StepRecorder` audits every step of
any loop under `protect`. Both are constraints, listed last, so that they measure what the others left; `record_steps` wraps any
optimizer and any weights, such as OSF's. docs/reference.md lists the fields.

    before  |(X - X_pre) V| of the step as the optimizer made it      X  A of a LoRA block, or a weight W
    after   the same after projection
    rho     |dW V| / |dW| since the start;  left_..  the same for U^T (B or W) and U^T dW, where there are left directions

The first violation is read directly after the optimizer; the second, for `record_steps`, when the next step begins or the block
ends, so a projection counts wherever it stands in the loop. A trace records round(linspace(0, steps, points)), both ends included;
the ratios of step 0, where nothing has moved, are null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anchorlora.adapters import Anchor
from anchorlora.constraints import innermost
from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Subspace
from anchorlora.measurement.directions import DirectionSource, FeatureCores, Protected
from anchorlora.measurement.drift import measure
from anchorlora.measurement.layers import Audited, Block, DriftReading, LayerChange, block_layer, square_of, weight_layer

Read = Callable[[], Tensor]
Reads = Mapping[str, Read]
Watched = Mapping[str, nn.Module | Tensor | Read]
Changes = Callable[[], Mapping[str, LayerChange]]  # of the layers since the task's start


class StepMoves:
    """How far one optimizer step moves tensors inside their protected directions: `watched` (.., d)."""

    def __init__(self, watched: Mapping[str, tuple[Read, Subspace]]) -> None:
        self.watched = watched
        self.before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Copy the tensors as they are before the step."""
        self.before = {name: read().detach().clone() for name, (read, _) in self.watched.items()}

    def inside(self) -> dict[str, float]:
        """Return the norm of each move inside its directions, by layer, computed in float64."""
        out = {}
        for name, (read, core) in self.watched.items():
            move = in_float64(read().detach()) - in_float64(self.before[name])
            out[name] = float(core.coordinates(move).norm())
        return out


def together(norms: Mapping[str, float]) -> float:
    """Return the norm over all layers."""
    return math.sqrt(sum(norm**2 for norm in norms.values()))


@dataclass(frozen=True)
class Trace(ProtectsPast):
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
        >>> from anchorlora import Anchor, ProjectDisplacement, Retract, protect
        >>> from anchorlora.measurement import Trace
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW(trained)
        >>> path = tmp / "trace.jsonl"
        >>> trace = Trace(path, steps=4, points=3)
        >>> with protect(optimizer, anchor, [Retract("A"), ProjectDisplacement("A"), trace]):
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
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to record.

        Args:
            anchor: The task's anchor, with cores.
        """
        return _Tracing(self, anchor)

    def recorded(self) -> list[int]:
        """Return the recorded steps, in order."""
        return sorted({round(i * self.steps / (self.points - 1)) for i in range(self.points)})


@dataclass(frozen=True)
class StepRecorder(ProtectsPast):
    """Record the optimizer steps of the adapted layers into a file; constrain nothing.  List it last.

    Args:
        path: JSON Lines file to append to.
        belief: Which directions count as protected; by default the cores of the anchor.
        every: Record every so many optimizer steps.

    Raises:
        InvalidValue: `every` is below 1.

    Example:
        >>> import json
        >>> from anchorlora import Anchor, Freeze, ProjectDisplacement, protect
        >>> model = tiny()
        >>> for p in model.parameters():
        ...     p.data += 0.02 * torch.randn_like(p) * p.requires_grad  # as after an earlier task
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        >>> with protect(optimizer, anchor, [Freeze("B"), ProjectDisplacement("A"), StepRecorder(tmp / "audit.jsonl")]):
        ...     for _ in range(2):
        ...         ids = torch.randint(64, (1, 8))
        ...         model(input_ids=ids, labels=ids).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> [json.loads(line)["step"] for line in (tmp / "audit.jsonl").read_text().splitlines()]
        [1, 2]
    """

    path: Path
    belief: DirectionSource = field(default_factory=FeatureCores)
    every: int = 1
    requires = ()

    def __post_init__(self) -> None:
        _check_every(self.every)

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to record a task.

        Args:
            anchor: The adapted layers at its start.

        Raises:
            InvalidValue: The layers are gated, or a layer has no protected directions.
        """
        if any(layer.gated for layer in anchor.layers):
            raise InvalidValue("an audit of steps cannot follow gates; record a gated method with Trace")
        protected = self.belief.on_layers(anchor)
        routing, outputs = ({s.name: partial(s.factor, name) for s in anchor.layers} for name in ("A", "B"))

        def layers() -> dict[str, LayerChange]:
            return {s.name: block_layer([Block(s.current, s.placed_start())], protected[s.name]) for s in anchor.layers}

        return _Auditing(self.path, self.every, protected, routing, outputs, layers)


@contextmanager
def record_steps(
    optimizer: Optimizer, layers: Watched, belief: DirectionSource | Mapping[str, Protected], path: Path, *, every: int = 1
) -> Iterator[None]:
    """Record what an optimizer does to weights, in any loop, while the block runs.

    Two copies of each weight are kept.

    Args:
        optimizer: Any torch optimizer with step hooks.
        layers: Name -> a module with a weight (d_out, d_in), the weight itself, or a function that returns the weight as it acts
            now, where it is made of other parameters (`anchorlora.adapters.realized_weights`).
        belief: Which directions count as protected, or the directions themselves by name.
        path: JSON Lines file to append to.
        every: Record every so many optimizer steps.

    Raises:
        InvalidType: The optimizer has no step hooks.
        InvalidValue: The directions have another width than a weight, or `every` is below 1.

    Example:
        >>> import json
        >>> from anchorlora.measurement import WeightDirections
        >>> layer = torch.nn.Linear(8, 6)
        >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        >>> with record_steps(optimizer, {"proj": layer}, WeightDirections(k=2), tmp / "audit.jsonl"):
        ...     layer(torch.randn(4, 8)).square().sum().backward()
        ...     optimizer.step()
        >>> json.loads((tmp / "audit.jsonl").read_text())["violation_before"] > 0
        True
    """
    _check_every(every)
    inner, reads = innermost(optimizer), {name: _reader(layer) for name, layer in layers.items()}
    with torch.no_grad():
        start = {name: read().detach().clone() for name, read in reads.items()}
        protected = dict(belief) if isinstance(belief, Mapping) else belief.on_weights(start)
        for name, weight in start.items():
            protected[name].fits(name, d_in=weight.shape[1], d_out=weight.shape[0])

    def now() -> dict[str, LayerChange]:
        return {name: weight_layer(start[name], read().detach(), protected[name]) for name, read in reads.items()}

    recorder = _Auditing(path, every, protected, reads, reads, now)

    @torch.no_grad()
    def before(*_: Any) -> None:
        recorder.after_optimizer_step()
        recorder.after_backward()

    @torch.no_grad()
    def after(*_: Any) -> None:
        recorder.after_raw_update()

    with inner.register_step_pre_hook(before), inner.register_step_post_hook(after):
        yield
        with torch.no_grad():
            recorder.after_optimizer_step()


class _Recording(ActiveConstraint):
    """Hooks of a recorded step, whoever calls them: how far it moved on each side, before and after projection."""

    def __init__(self, path: Path | str, is_due: Callable[[int], bool], sides: Mapping[str, StepMoves]) -> None:
        self.path, self.is_due, self.sides, self.step = Path(path), is_due, sides, 0
        self.raw: dict[str, dict[str, float]] | None = None

    @property
    def due(self) -> bool:
        """True if the step that is being made is recorded."""
        return self.is_due(self.step + 1)

    def begin(self, step: int) -> None:
        self.step = step

    def after_backward(self) -> None:
        if self.due:
            for moves in self.sides.values():
                moves.begin()

    def after_raw_update(self) -> None:
        """Measure what the optimizer made; nothing is projected yet."""
        if self.due:
            self.raw = {side: moves.inside() for side, moves in self.sides.items()}
        self.step += 1

    def after_optimizer_step(self) -> None:
        """Projections are done: write the step if it is due and not yet written."""
        if self.raw is not None:
            raw, self.raw = self.raw, None
            self.write(self.line(raw, {side: moves.inside() for side, moves in self.sides.items()}))

    def line(self, before: Mapping[str, dict[str, float]], after: Mapping[str, dict[str, float]]) -> dict[str, Any]:
        """Return the line of a step, by the norms of its moves: side -> layer -> norm."""
        raise NotImplementedError

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


class _Auditing(_Recording):
    """Steps with the reading of an audit at each."""

    def __init__(
        self, path: Path, every: int, protected: Mapping[str, Protected], right: Reads, left: Reads, layers: Changes
    ) -> None:
        sides = {"": StepMoves({name: (read, protected[name].right) for name, read in right.items()})}
        two_sided = {name: (read, U) for name, read in left.items() if (U := protected[name].left) is not None}
        if two_sided and len(two_sided) == len(left):
            sides["left_"] = StepMoves({name: (partial(_transpose, read), U) for name, (read, U) in two_sided.items()})
        super().__init__(path, lambda step: step % every == 0, sides)
        self.layers = layers

    def line(self, before: Mapping[str, dict[str, float]], after: Mapping[str, dict[str, float]]) -> dict[str, Any]:
        audited = Audited.of(self.layers())
        line: dict[str, Any] = {"step": self.step, **_numbers(audited.overall)}
        rows: dict[str, Any] = {name: _numbers(reading) for name, reading in audited.layers.items()}
        for side in self.sides:
            for moment, norms in (("before", before[side]), ("after", after[side])):
                line[f"{side}violation_{moment}"] = together(norms)
                for name, norm in norms.items():
                    rows[name][f"{side}violation_{moment}"] = norm
        return {**line, "layers": rows}


class _Tracing(_Recording):
    """Steps with the drift of the task at each, and what its gradients were."""

    def __init__(self, trace: Trace, anchor: Anchor) -> None:
        moves = StepMoves({s.name: (partial(s.factor, "A"), s.core) for s in anchor.layers if s.core is not None})
        super().__init__(trace.path, set(trace.recorded()).__contains__, {"": moves})
        self.trace, self.anchor = trace, anchor
        self.others: Sequence[ActiveConstraint] = ()
        self.norms: dict[str, float | None] = {"task": None, "penalties": None}
        self.gradients: dict[int, Tensor] = {}  # those of the task loss, by the number of the factor

    def see(self, active: Sequence[ActiveConstraint]) -> None:
        self.others = [c for c in active if c is not self]

    def begin(self, step: int) -> None:
        super().begin(step)
        if step == 0:
            self.write(self.line({}, {}))

    def after_backward(self) -> None:
        super().after_backward()
        if self.due:
            self.gradients = {i: in_float64(g).clone() for i, g in self.gradients_now().items()}
            self.norms["task"] = _norm([*self.gradients.values()])

    def add_penalty_grads(self) -> None:
        if self.due:  # listed last: the others have added theirs
            now = self.gradients_now()  # also of factors that the task loss did not reach
            self.norms["penalties"] = _norm([in_float64(g) - self.gradients.get(i, 0.0) for i, g in now.items()])

    def gradients_now(self) -> dict[int, Tensor]:
        factors = [layer.factor(name) for layer in self.anchor.layers for name in ("A", "B")]
        return {i: p.grad for i, p in enumerate(factors) if p.grad is not None}

    def line(self, before: Mapping[str, dict[str, float]], after: Mapping[str, dict[str, float]]) -> dict[str, Any]:
        drift, violations = measure(self.anchor), {"wrp_before": before, "wrp_after": after}
        line: dict[str, Any] = {"task": self.trace.task, "step": self.step, **drift.as_dict()}
        line |= {name: together(norms[""]) if norms else None for name, norms in violations.items()}
        line["penalties"] = {name: value for c in self.others for name, value in c.readings().items()} if self.step else {}
        line |= {"grad_norms": dict(self.norms), "moves": {name: self.moved(name) for name in ("A", "B")}}
        if self.trace.per_layer:
            line["layers"] = {layer: layer_drift.as_dict() for layer, layer_drift in drift.layers.items()}
        return line

    def moved(self, name: str) -> float:
        """Norm of what a factor has moved in this task, over all layers."""
        pairs = [(layer.current.whole(), layer.placed_start().whole()) for layer in self.anchor.layers]
        return _norm([in_float64(getattr(now, name).detach()) - in_float64(getattr(start, name)) for now, start in pairs])

    def write(self, line: dict[str, Any]) -> None:
        self.trace.check()
        super().write(line)


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(sum(map(square_of, parts)))


def _numbers(reading: DriftReading) -> dict[str, float | None]:
    right = {name: getattr(reading.right, name) for name in ("d_eff", "d_old", "rho", "rho_floor", "chance")}
    left = {f"left_{name}": getattr(reading.left, name) for name in ("rho", "rho_floor", "chance")} if reading.left else {}
    return right | left


def _transpose(read: Read) -> Tensor:
    return read().mT


def _reader(layer: nn.Module | Tensor | Read) -> Read:
    if isinstance(layer, nn.Module):
        return lambda: layer.weight  # type: ignore[return-value]  # read anew: a weight may be replaced
    return (lambda: layer) if isinstance(layer, Tensor) else layer


def _check_every(every: int) -> None:
    if every < 1:
        raise InvalidValue(f"every counts optimizer steps and is at least 1, not {every}")
