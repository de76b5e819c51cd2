"""Protection in Lightning:  Trainer(callbacks=[LightningProtection(constraints, cores=cores)])."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

from anchorlora.adapters import Anchor
from anchorlora.constraints import holds_factors
from anchorlora.errors import AnchorloraError, InvalidValue, MissingExtra
from anchorlora.integrations.base import CallbackBase

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError:

        class Callback:  # type: ignore[no-redef]  # stands in, so that `from anchorlora import *` works without Lightning
            def __new__(cls, *_: Any, **__: Any) -> Any:
                raise MissingExtra("LightningProtection needs Lightning: pip install lightning")


class LightningProtection(CallbackBase, Callback):
    """Protect LoRA factors while Lightning fits a module.

    The PEFT model is found inside the LightningModule, and the optimizer that trains its factors among the trainer's. Automatic and
    manual optimization both work. `measure(callback.anchor)` gives the drift since `fit` began, or since the training began that a
    checkpoint goes on with.

    Args:
        constraints: Constraints, in the order in which they act, as `protect` takes them. None takes those of the anchor at hand,
            as `create_protected_optimizer` does.
        cores: Layer path -> protected subspace (d_in, k), or a tensor with orthonormal columns.
        wides: Layer path -> wide basis; only `EffectiveResponse` reads it.
        past: What `AnswerSensitivity` remembers; without constraints, a new block is braked by it.
        adapter_name: The adapter that trains; None takes the active one.
        history: Name of an adapter that holds the frozen blocks of earlier tasks.
        anchor: An anchor of your own, when training does not start from the model as it is then; it replaces the five arguments
            above.
        check_every: Optimizer steps between two verifications on the live parameters.
        also_training: Modules that train without protection, such as "lm_head".

    Raises:
        MissingExtra: Lightning is not installed.

    Example:
        >>> from anchorlora import Freeze, ProjectDisplacement
        >>> from anchorlora.integrations.lightning import LightningProtection
        >>> model = tiny()
        >>> callback = LightningProtection([Freeze("B"), ProjectDisplacement("A")], cores=cores_of(model))
        >>> len(callback.constraints)  # L.Trainer(callbacks=[callback]).fit(module, data)
        2
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Note how training begins, before a checkpoint is loaded.

        Args:
            trainer: Lightning's trainer.
            pl_module: The LightningModule.
            stage: "fit", or another, where nothing trains.
        """
        self.chosen, self.empty, self.starts = None, False, {}
        if stage == "fit":
            with suppress(AnchorloraError):  # a model that `configure_model` makes is not there yet
                self.note_beginning(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to protect the one optimizer that trains the factors.

        Args:
            trainer: Lightning's trainer.
            pl_module: The LightningModule that holds the PEFT model.

        Raises:
            InvalidValue: No optimizer trains the factors, or several do.
        """
        if self.constraints is None and self.chosen is None and trainer.global_step:
            raise InvalidValue('a checkpoint does not say how its training began: give the constraints, such as [Retract("A"), ..]')
        if getattr(trainer.strategy.launcher, "_start_method", None) and not self.own_anchor:  # "spawn" or "fork"
            warnings.warn(
                "the anchor stays in the processes that this strategy starts, and callback.anchor is None where fit was called; to "
                "measure there, give the callback anchor=Anchor.of(model, cores=..)",
                stacklevel=2,
            )
        anchor = (self.own_anchor and self.anchor) or Anchor.of(pl_module, **self.anchoring)
        holding = [optimizer for optimizer in trainer.optimizers if holds_factors(optimizer, anchor)]
        if len(holding) != 1:
            raise InvalidValue(
                f"{len(holding)} of {len(trainer.optimizers)} optimizers hold LoRA factors; one must hold all of them, in "
                "parameter groups where settings differ"
            )
        self.begin(pl_module, holding[0])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must say of how its training began."""
        return {"empty": self.began_empty, "starts": self.start_tensors()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint says of how its training began.

        Args:
            state_dict: What `state_dict` has returned.
        """
        self.empty |= bool(state_dict.get("empty"))
        self.starts = state_dict.get("starts", {})

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Verify the constraints a last time and release everything, after callbacks that write an average of the weights.

        Args:
            trainer: Lightning's trainer.
            pl_module: The LightningModule.
        """
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release everything after an exception.

        Args:
            trainer: Lightning's trainer.
            pl_module: The LightningModule.
            exception: The exception; what the last verification finds is added to it as a note.
        """
        self.release(exception)
