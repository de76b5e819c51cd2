"""Protection and audit in transformers' Trainer and what builds on it, such as TRL's SFTTrainer.

trainer = SFTTrainer(model, args, train_dataset, callbacks=[ProtectionCallback(constraints, cores=cores)])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from anchorlora.constraints import innermost
from anchorlora.diagnostics import auditing
from anchorlora.diagnostics.beliefs import Belief, Protected
from anchorlora.integrations.session import Session


class ProtectionCallback(Session, TrainerCallback):
    """`protect` from the beginning of `trainer.train()` to its end; arguments as of `Session`.

    Raises what `protect` raises, when training begins; ProtectionLost during training or at its end.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **_: Any) -> None:
        if optimizer is None:
            raise TypeError("the trainer shows its callbacks no optimizer, so no step can be protected; use DDP or FSDP2")
        self.begin(model, optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.end()


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
