"""One protected training, entered and left by a trainer's callbacks instead of a `with` block."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from anchorlora.adapters import NOTHING, Anchor
from anchorlora.constraints import ActiveConstraint, Constraint, protect
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.errors import InvalidType
from anchorlora.geometry import Subspace


class Session:
    """What the callbacks share: build the scope when training begins, protect, and give everything back at the end.

    constraints: as `protect` takes them. cores, wides, block, history: as `Anchor.of` takes them; or a `anchor` of your own, when
    the anchor is not the model as it is when training begins. check_every, also_training: as `protect` takes them. After training
    `anchor` is there for `measure(callback.anchor)`.
    """

    def __init__(
        self,
        constraints: Sequence[Constraint],
        *,
        cores: Mapping[str, Subspace] = NOTHING,
        wides: Mapping[str, Subspace] = NOTHING,
        block: str | None = None,
        history: str | None = None,
        anchor: Anchor | None = None,
        check_every: int = CHECK_EVERY,
        also_training: Collection[str] = (),
    ) -> None:
        self.constraints, self.check_every, self.also_training = tuple(constraints), check_every, tuple(also_training)
        self.kept: dict[str, Any] = {"cores": cores, "wides": wides, "block": block, "history": history}
        self.anchor, self.own_scope = anchor, anchor is not None
        self.stack = ExitStack()
        self.held: list[ActiveConstraint] = []

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Protect `optimizer`.  Called again before `end`, as when a trainer starts over, it keeps the first anchor."""
        again = bool(self.held)
        self.release()
        if self.anchor is None or not (self.own_scope or (again and self.anchor.replaced() is None)):
            self.anchor = Anchor.of(model, **self.kept)
        how: dict[str, Any] = {"check_every": self.check_every, "also_training": self.also_training}
        self.held = self.stack.enter_context(protect(optimizer, self.anchor, self.constraints, **how))
        needy = [type(h).__name__.strip("_") for h in self.held if type(h).loss is not ActiveConstraint.loss]
        if needy:
            self.release()
            raise InvalidType(f"{needy[0]} adds to the loss, and no callback can do that; use protect() in a loop of your own")

    def end(self) -> None:
        """Look at the promises a last time, take the hooks off, give frozen factors back."""
        self.held = []
        self.stack.close()

    def release(self, error: BaseException | None = None) -> None:
        """Give everything back after an exception; what the last look finds is added to it as a note."""
        error = error or RuntimeError("the training was given up")
        self.held = []
        stack, self.stack = self.stack, ExitStack()
        stack.__exit__(type(error), error, error.__traceback__)
