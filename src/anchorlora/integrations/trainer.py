"""Protection in transformers' Trainer and what builds on it, such as TRL's SFTTrainer.

trainer = SFTTrainer(model, args, train_dataset, callbacks=[ProtectionCallback(constraints, cores=cores)])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

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
