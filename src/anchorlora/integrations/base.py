"""One protected training, begun and ended by a trainer's callbacks instead of a `with` block."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from anchorlora.adapters import NOTHING, AdaptedLayer, Anchor
from anchorlora.adapters.sharding import as_split, local
from anchorlora.constraints import ActiveConstraint, Constraint, ProjectDisplacement, protect
from anchorlora.constraints.checks import not_finite, true_precision
from anchorlora.constraints.created import constraints_for
from anchorlora.constraints.protect import as_constraints
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.errors import InvalidType, InvalidValue
from anchorlora.geometry import LayerCore, Subspace


class CallbackBase:
    """Base of the callbacks: make the anchor when training begins, protect, and release everything at the end, except `anchor`, for
    `measure(callback.anchor)`; `cores` (d_in, k).
    """

    def __init__(
        self,
        constraints: Constraint | Iterable[Constraint] | None = None,
        *,
        cores: Mapping[str, Subspace | LayerCore | Tensor] = NOTHING,
        wides: Mapping[str, Subspace | Tensor] = NOTHING,
        past: Mapping[str, Tensor] = NOTHING,
        adapter_name: str | None = None,
        history: str | None = None,
        anchor: Anchor | None = None,
        check_every: int = CHECK_EVERY,
        also_training: Collection[str] = (),
    ) -> None:
        self.constraints = None if constraints is None else as_constraints(constraints)
        self.check_every = check_every
        self.also_training = (also_training,) if isinstance(also_training, str) else tuple(also_training)
        self.anchoring: dict[str, Any] = {"cores": cores, "wides": wides, "past": past}
        self.anchoring = {name: dict(m) if isinstance(m, Mapping) else m for name, m in self.anchoring.items()}  # can be pickled
        self.anchoring |= {"adapter_name": adapter_name, "history": history}
        self.anchor, self.own_anchor = anchor, anchor is not None
        self.stack = ExitStack()
        self.chosen: list[Constraint] | None = None  # of the model before a checkpoint or a first try, where none are given
        self.empty = False  # whether training began with B = 0, though a checkpoint is loaded since
        self.began_empty = False  # the same of the last training, for its checkpoints
        self.starts: Mapping[str, Tensor] = {}  # of the training that a checkpoint goes on with: its factors when it began
        self.active: list[ActiveConstraint] = []

    def note_beginning(self, model: nn.Module) -> Anchor:
        """Note how training begins, before a checkpoint is loaded: the constraints where none are given, and whether B = 0."""
        anchor = self.anchor if self.own_anchor and self.anchor is not None else Anchor.of(model, **self.anchoring)
        self.chosen = constraints_for(anchor) if self.constraints is None else None
        self.empty = self._is_empty(anchor)
        return anchor

    def _is_empty(self, anchor: Anchor) -> bool:
        return not self.own_anchor and not any(bool(layer.start.whole().B.any()) for layer in anchor.layers)

    def start_tensors(self) -> dict[str, Tensor]:
        """Return the factors that training began with, whole, for its checkpoints; an anchor of one's own knows them itself. All
        processes must call it.
        """
        layers = self._layers() if self.anchor is not None and not self.own_anchor else []
        return {f"{layer.name}.{n}": getattr(layer.placed_start().whole(), n) for layer in layers for n in layer.names}

    def _layers(self) -> list[AdaptedLayer]:
        assert self.anchor is not None
        return [*self.anchor.layers, *(self.anchor.beside.layers if self.anchor.beside is not None else ())]

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Start to protect. A second call before `end`, as when a trainer starts over, keeps the first anchor and constraints."""
        again, chosen, empty, starts = bool(self.active), self.chosen, self.empty, self.starts
        self.release()
        self.empty = empty
        if self.anchor is None or not (self.own_anchor or (again and self.anchor.replaced() is None)):
            self.anchor = Anchor.of(model, **self.anchoring)
            for layer in self.anchor.layers if empty else ():
                layer.start.B.zero_()  # as it was, whatever a checkpoint has brought
            for layer in self._layers():
                for name in filter(lambda name: f"{layer.name}.{name}" in starts, layer.names):
                    start = layer.start_factor(name)
                    local(start).copy_(local(as_split(starts[f"{layer.name}.{name}"].to(start.device, start.dtype), start)))
        self.began_empty = self._is_empty(self.anchor)
        how: dict[str, Any] = {"check_every": self.check_every, "also_training": self.also_training}
        constraints: Sequence[Constraint] = self.constraints or ()
        if self.constraints is None:
            constraints = self.chosen = chosen or constraints_for(self.anchor)
        kept = starts and any("displacement" in getattr(constraint, "closes", ()) for constraint in constraints)
        with true_precision(self.anchor):
            kept = kept and not_finite(self.anchor) is None  # else `protect` says so
            moved = ProjectDisplacement("A").begin_task(self.anchor).violation() if kept else None
        if moved:
            raise InvalidValue(f"the checkpoint was trained with other cores: {moved}; give those that its training began with")
        self.active = self.stack.enter_context(protect(optimizer, self.anchor, constraints, **how))
        needy = [type(c).__name__.strip("_") for c in self.active if type(c).loss is not ActiveConstraint.loss]
        if needy:
            self.release()
            raise InvalidType(f"{needy[0]} adds to the loss, and no callback can do that; use protect() in a loop of your own")

    def end(self) -> None:
        """Verify the constraints a last time, remove the hooks, and release frozen factors."""
        self.active, self.chosen, self.empty, self.starts = [], None, False, {}
        self.stack.close()

    def release(self, error: BaseException | None = None) -> None:
        """Release everything after an exception."""
        error = error or RuntimeError("the training was given up")
        self.active, self.chosen, self.empty, self.starts = [], None, False, {}
        stack, self.stack = self.stack, ExitStack()
        stack.__exit__(type(error), error, error.__traceback__)
