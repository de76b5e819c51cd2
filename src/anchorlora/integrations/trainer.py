"""Protection and audit in transformers' Trainer and what builds on it, such as TRL's SFTTrainer.

trainer = SFTTrainer(model, args, train_dataset, callbacks=[ProtectionCallback(constraints, cores=cores)])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import TrainerCallback

from anchorlora.adapters import activate
from anchorlora.audits.directions import Belief, Protected
from anchorlora.audits.recorder import auditing
from anchorlora.constraints import innermost
from anchorlora.errors import InvalidType
from anchorlora.integrations.session import Session

if TYPE_CHECKING:
    from transformers import Trainer


class ProtectionCallback(Session, TrainerCallback):
    """`protect` from the beginning of `trainer.train()` to its end, also by an exception; arguments as of `Session`.

    Raises what `protect` raises, when training begins; ProtectionLost during training or at its end. Give it to the trainer's
    constructor: a trainer tells its callbacks nothing of an exception, so `train` is followed from there. Of a callback that is
    added later, B stays frozen and the hooks on after an exception until `release` is called.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = _constructed()
        if trainer is not None:
            trainer.train = self._released(trainer.train)
            trainer.create_optimizer = self._activated(trainer, trainer.create_optimizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **_: Any) -> None:
        if optimizer is None:
            raise InvalidType("the trainer shows its callbacks no optimizer, so no step can be protected; use DDP or FSDP2")
        self.begin(model, optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()

    def _released(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train)
        def released(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            except BaseException as error:
                self.release(error)
                raise

        return released

    def _activated(self, trainer: Trainer, create: Callable[..., Any]) -> Callable[..., Any]:
        """A trainer that takes up a checkpoint leaves one adapter active, and not the one that trains."""

        @wraps(create)
        def activated(*args: Any, **kwargs: Any) -> Any:
            block, history = self.kept["block"], self.kept["history"]
            if block is not None and history is not None:
                activate(trainer.model, block, history=history)
            return create(*args, **kwargs)

        return activated


def _constructed() -> Trainer | None:
    """The trainer whose constructor is calling."""
    from transformers import Trainer  # loaded by then, and only then

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


class AuditCallback(TrainerCallback):
    """`auditing` from the beginning of `trainer.train()` to its end, for weights that are no LoRA factors, such as OSF's.

    For LoRA list `Audit` last in `ProtectionCallback([...])`, which also sees each step before it is projected.
    layers, belief, path, every: as `auditing` takes them, or a function that is given the model and returns the layers.
    """

    def __init__(
        self,
        layers: Callable[[nn.Module], Mapping[str, Any]] | Mapping[str, nn.Module | Tensor | Callable[[], Tensor]],
        belief: Belief | Mapping[str, Protected],
        path: Path,
        *,
        every: int = 1,
    ) -> None:
        self.layers, self.belief, self.path, self.every = layers, belief, path, every
        self.stack = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **_: Any) -> None:
        self.stack.close()
        layers = self.layers(model) if callable(self.layers) else self.layers
        self.stack.enter_context(auditing(innermost(optimizer), layers, self.belief, self.path, every=self.every))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stack.close()
