"""Record what every optimizer step does to protected directions, one JSON line per step; nothing is constrained.

`StepRecorder` is a constraint for `protect`, listed last; `record_steps` wraps any optimizer and any weights, such as OSF's.

    violation_before  |(X - X_pre) V| of the step as the optimizer made it      X  A of a LoRA block, or a weight W
    violation_after   the same after projection
    rho               |dW V| / |dW| since the start;  left_..  the same for U^T (B or W) and U^T dW, where there are left directions

The first violation is read directly after the optimizer; the second, for `record_steps`, when the next step begins or the block
ends, so a projection counts wherever it stands in the loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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
from anchorlora.constraints.base import ActiveConstraint
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Subspace
from anchorlora.measurement.conditions import Read, StepMoves, together
from anchorlora.measurement.directions import Belief, FeatureCores, Protected
from anchorlora.measurement.layers import Audited, Block, DriftReading, LayerChange, block_layer, weight_layer

Watched = Mapping[str, nn.Module | Tensor | Callable[[], Tensor]]


@dataclass(frozen=True)
class StepRecorder:
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
    belief: Belief = field(default_factory=FeatureCores)
    every: int = 1
    first_task = 2
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
        routing = {s.name: (partial(s.factor, "A"), protected[s.name].right) for s in anchor.layers}
        outputs = {s.name: (partial(_transpose, partial(s.factor, "B")), protected[s.name].left) for s in anchor.layers}

        def layers() -> dict[str, LayerChange]:
            return {s.name: block_layer([Block(s.current, s.start)], protected[s.name]) for s in anchor.layers}

        return _Auditing(_Recorder(self.path, self.every, StepMoves(routing), _left_moves(outputs), layers))

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return nothing: later tasks need nothing of an audit.

        Args:
            anchor: The adapted layers at the task's end.
        """
        return {}


@contextmanager
def record_steps(
    optimizer: Optimizer, layers: Watched, belief: Belief | Mapping[str, Protected], path: Path, *, every: int = 1
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
    rights = {name: (read, protected[name].right) for name, read in reads.items()}
    lefts = {name: (partial(_transpose, read), protected[name].left) for name, read in reads.items()}

    def now() -> dict[str, LayerChange]:
        return {name: weight_layer(start[name], read().detach(), protected[name]) for name, read in reads.items()}

    recorder = _Recorder(path, every, StepMoves(rights), _left_moves(lefts), now)

    @torch.no_grad()
    def before(*_: Any) -> None:
        recorder.settle()
        recorder.begin()

    @torch.no_grad()
    def after(*_: Any) -> None:
        recorder.after_raw_update()

    hooks: list[Any] = []
    try:
        hooks = [inner.register_step_pre_hook(before), inner.register_step_post_hook(after)]
        yield
        with torch.no_grad():
            recorder.settle()
    finally:
        for hook in hooks:
            hook.remove()


class _Recorder:
    """The hooks of a step, whoever calls them, and the file."""

    def __init__(
        self, path: Path, every: int, right: StepMoves, left: StepMoves | None, layers: Callable[[], Mapping[str, LayerChange]]
    ) -> None:
        self.path, self.every, self.layers = path, every, layers
        self.sides = {"": right} | ({"left_": left} if left else {})
        self.step = 0
        self.raw: dict[str, dict[str, float]] | None = None

    @property
    def due(self) -> bool:
        """True if the current step is recorded."""
        return (self.step + 1) % self.every == 0

    def begin(self) -> None:
        if self.due:
            for moves in self.sides.values():
                moves.begin()

    def after_raw_update(self) -> None:
        """Measure what the optimizer made; nothing is projected yet."""
        if self.due:
            self.raw = {side: moves.inside() for side, moves in self.sides.items()}
        self.step += 1

    def settle(self) -> None:
        """Projections are done: write the step if it is due and not yet written."""
        if self.raw is None:
            return
        after = {side: moves.inside() for side, moves in self.sides.items()}
        audited = Audited.of(self.layers())
        line: dict[str, Any] = {"step": self.step, **_numbers(audited.overall)}
        rows: dict[str, Any] = {name: _numbers(reading) for name, reading in audited.layers.items()}
        for side in self.sides:
            for moment, norms in (("before", self.raw[side]), ("after", after[side])):
                line[f"{side}violation_{moment}"] = together(norms)
                for name, norm in norms.items():
                    rows[name][f"{side}violation_{moment}"] = norm
        self.raw = None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "layers": rows}, ensure_ascii=False) + "\n")


class _Auditing(ActiveConstraint):
    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def begin(self, step: int) -> None:
        self.recorder.step = step

    def after_backward(self) -> None:
        self.recorder.begin()

    def after_raw_update(self) -> None:
        self.recorder.after_raw_update()

    def after_optimizer_step(self) -> None:
        self.recorder.settle()


def _numbers(reading: DriftReading) -> dict[str, float | None]:
    right = {name: getattr(reading.right, name) for name in ("d_eff", "d_old", "rho", "rho_floor", "chance")}
    left = {f"left_{name}": getattr(reading.left, name) for name in ("rho", "rho_floor", "chance")} if reading.left else {}
    return right | left


def _left_moves(watched: Mapping[str, tuple[Read, Subspace | None]]) -> StepMoves | None:
    """Moves on the left side, if every layer has one."""
    two_sided = {name: (read, left) for name, (read, left) in watched.items() if left is not None}
    return StepMoves(two_sided) if two_sided and len(two_sided) == len(watched) else None


def _transpose(read: Read) -> Tensor:
    return read().mT


def _reader(layer: nn.Module | Tensor | Callable[[], Tensor]) -> Read:
    if isinstance(layer, nn.Module):
        return lambda: layer.weight  # type: ignore[return-value]  # read anew: a weight may be replaced
    return (lambda: layer) if isinstance(layer, Tensor) else layer


def _check_every(every: int) -> None:
    if every < 1:
        raise InvalidValue(f"every counts optimizer steps and is at least 1, not {every}")
