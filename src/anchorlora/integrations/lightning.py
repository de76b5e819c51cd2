"""Protection in Lightning:  Trainer(callbacks=[LightningProtection(constraints, cores=cores)])."""

from __future__ import annotations

from typing import Any

from anchorlora.adapters import Anchor
from anchorlora.constraints import holds_factors
from anchorlora.errors import InvalidValue, MissingExtra
from anchorlora.integrations.session import Session

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError:

        class Callback:  # type: ignore[no-redef]  # stands in, so that `from anchorlora import *` works without Lightning
            def __new__(cls, *_: Any, **__: Any) -> Any:
                raise MissingExtra("LightningProtection needs Lightning: pip install lightning")


class LightningProtection(Session, Callback):
    """`protect` while a LightningModule is fitted, on the optimizer that holds the factors; arguments as of `Session`.

    The PEFT model is found inside the LightningModule. Automatic and manual optimization both work.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        anchor = (self.own_scope and self.anchor) or Anchor.of(pl_module, **self.kept)
        mine = [optimizer for optimizer in trainer.optimizers if holds_factors(optimizer, anchor)]
        if len(mine) != 1:
            raise InvalidValue(f"{len(mine)} of {len(trainer.optimizers)} optimizers hold the LoRA factors; exactly one must")
        self.begin(pl_module, mine[0])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.release(exception)
