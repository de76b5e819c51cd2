"""Protection and audit in transformers' Trainer and in trainers that build on it, such as TRL's SFTTrainer.

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

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from anchorlora.adapters import NOTHING, Anchor, activate
from anchorlora.adapters.attach import DEFAULT
from anchorlora.constraints import innermost
from anchorlora.constraints.optimizers import declared
from anchorlora.errors import InvalidType, InvalidValue
from anchorlora.integrations.base import CallbackBase
from anchorlora.measurement.directions import DirectionSource, Protected
from anchorlora.measurement.recorder import record_steps
from anchorlora.store.adapter_config import CONFIG_FILE
from anchorlora.store.tensors import write_tensors

if TYPE_CHECKING:
    from transformers import Trainer


STATE = "anchorlora"  # in trainer_state.json: what a checkpoint says of how its training began
STARTS = "anchorlora_starts.safetensors"  # in a checkpoint: the factors that its training began with


class ProtectionCallback(CallbackBase, TrainerCallback):
    """Protect LoRA factors from the beginning of `trainer.train()` to its end, also by an exception.

    `train()` raises what `protect` raises. Pass the callback to the trainer's constructor: a trainer does not tell its callbacks
    of an exception, so the callback wraps `train` from there. With a callback that is added later, hooks and frozen factors stay
    after an exception until `release` is called. `measure(callback.anchor)` gives the drift since `train()` began, or
    since the training began that a checkpoint goes on with.

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

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> from anchorlora import Freeze, ProjectDisplacement, ProtectionCallback, measure
        >>> model = tiny()
        >>> for p in model.parameters():
        ...     p.data += 0.02 * torch.randn_like(p) * p.requires_grad  # as after an earlier task
        >>> callback = ProtectionCallback([Freeze("B"), ProjectDisplacement("A")], cores=cores_of(model))
        >>> quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        >>> args = TrainingArguments(output_dir=str(tmp), max_steps=2, use_cpu=True, **quiet)
        >>> rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 16
        >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback])
        >>> _ = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> measure(callback.anchor).exact
        True
    """

    wraps = False  # whether a wrapped `train` is under way
    resumed: str | None = None  # the checkpoint that training goes on from
    adapters: tuple[str | None, str | None] = (None, None)  # that trains, and the one active beside it

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wrap the trainer's `train`, so that an exception releases everything.

        Args:
            args: The trainer's arguments.
            state: The trainer's state.
            control: The trainer's control.
        """
        trainer = _find_trainer()
        if trainer is not None:
            self._undo_cast(trainer.model)
            trainer.train = self._release_after(trainer, trainer.train)
            trainer.create_optimizer = self._activate_after(trainer, trainer.create_optimizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **_: Any) -> None:
        """Start to protect the trainer's optimizer.

        Args:
            args: The trainer's arguments.
            state: The trainer's state.
            control: The trainer's control.
            model: The model that trains.
            optimizer: The trainer's optimizer.

        Raises:
            InvalidType: The trainer has no optimizer of its own, as with FSDP1 or DeepSpeed.
            InvalidValue: The trainer has a reference without the history, would load its best model into it, or resumes unseen.
        """
        if optimizer is None:
            raise InvalidType("the trainer shows its callbacks no optimizer, so no step can be protected; use DDP or FSDP2")
        if state.global_step and not (self.wraps or self.own_anchor):
            raise InvalidValue(
                "a callback that is added later does not know the checkpoint that training goes on from; give it to the trainer's "
                "constructor: callbacks=[..]"
            )
        if self.anchoring["history"] is not None and getattr(args, "precompute_ref_log_probs", False):
            raise InvalidValue("precompute_ref_log_probs leaves the history out of the reference; set it to False")
        active = getattr(model, "active_adapters", [])
        if getattr(args, "load_best_model_at_end", False) and len(active) > 1:
            raise InvalidValue(
                f"load_best_model_at_end loads into the first of the active adapters, {active[0]}; set it to False, and load the "
                "best checkpoint yourself"
            )
        if self.resumed and (Path(self.resumed) / STARTS).is_file():
            self.starts = load_file(Path(self.resumed) / STARTS)
        self.empty |= state.stateful_callbacks.get(STATE, {}).get("empty", False)  # of a checkpoint, which training goes on from
        self.begin(model, optimizer)
        state.stateful_callbacks[STATE] = {"empty": self.began_empty}

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the factors that training began with into a checkpoint.

        Args:
            args: The trainer's arguments.
            state: The trainer's state.
            control: The trainer's control.
        """
        tensors, folder = self.start_tensors(), Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if tensors and args.should_save and folder.is_dir():
            write_tensors(folder / STARTS, tensors)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Verify the constraints a last time and release everything, unless the wrapper of `train` will.

        Args:
            args: The trainer's arguments.
            state: The trainer's state.
            control: The trainer's control.
        """
        if not self.wraps:  # else after all callbacks, which may write an average of the weights yet
            self.end()

    def _undo_cast(self, model: Any) -> None:
        # TRL casts factors over a quantized model to bfloat16 while it is constructed
        if not (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
            return
        anchor = self.anchor or Anchor.of(model, **self.anchoring | {"cores": NOTHING, "wides": NOTHING})
        beside = self.anchoring["cores"].keys() - {layer.name for layer in anchor.layers}
        cast = [name for name, p in anchor.trains_beside().items() if p.dtype == torch.bfloat16 and declared(name, beside)]
        for layer in [*anchor.layers, *(anchor.beside.layers if anchor.beside else ())]:
            live = [layer.factor(name) for name in layer.names]
            if all(factor.dtype != torch.bfloat16 for factor in live):
                continue
            if not self.own_anchor and (cast or bool(layer.factor("B").any())):
                what = f"{cast[0]} beside the adapter" if cast else f"a learned adapter at {layer.name}"
                raise InvalidType(
                    f"{what} was rounded to bfloat16, as TRL does over a quantized model; load it anew, and give the callback an "
                    "anchor that is made before the trainer: anchor=Anchor.of(model, cores=cores)"
                )
            for name, factor in zip(layer.names, live, strict=True):
                factor.data = layer.start_factor(name).to(torch.float32, copy=True)

    def _release_after(self, trainer: Trainer, train: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train)
        def train_and_release(*args: Any, **kwargs: Any) -> Any:
            self.adapters = self.anchoring["adapter_name"], self.anchoring["history"]
            self.resumed = kwargs.get("resume_from_checkpoint", args[0] if args else None)
            if self.resumed is True:
                self.resumed = get_last_checkpoint(trainer.args.output_dir)
            self.wraps = True
            try:
                self.chosen, self.empty, self.starts = None, False, {}
                beginning = self.note_beginning(trainer.model) if self.resumed else None
                if beginning is not None and beginning.layers[0].whole is not None:  # LoRA, no full weights
                    name, active = beginning.adapter_name, beginning.layers[0].whole.scales
                    self.adapters = (name, next((other for other in active if other != name), None))
                output = train(*args, **kwargs)
                self.end()
                return output
            except BaseException as error:
                self.release(error)
                raise
            finally:  # a trainer that it is added to later has a `train` of its own
                self.wraps, self.resumed = False, None

        return train_and_release

    def _activate_after(self, trainer: Trainer, create: Callable[..., Any]) -> Callable[..., Any]:
        """Activate both adapters again: a trainer that resumes from a checkpoint leaves one active, and not the one that trains."""

        @wraps(create)
        def create_and_activate(*args: Any, **kwargs: Any) -> Any:
            if self.resumed:
                _load_left_out(trainer.model, Path(self.resumed))
            adapter_name, history = self.adapters
            if adapter_name is not None and history is not None:
                activate(trainer.model, adapter_name, history=history)
            return create(*args, **kwargs)

        return create_and_activate


def _load_left_out(model: Any, checkpoint: Path) -> None:
    """Load the adapter "default" of a checkpoint with others beside it: transformers up to 5.16, at least, loads those alone."""
    if (checkpoint / CONFIG_FILE).is_file() and any(checkpoint.glob(f"*/{CONFIG_FILE}")) and DEFAULT in model.peft_config:
        model.load_adapter(str(checkpoint), DEFAULT, is_trainable=True)


def _find_trainer() -> Trainer | None:
    """The trainer whose constructor is calling."""
    from transformers import Trainer  # loaded by then, and only then

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


class StepRecorderCallback(TrainerCallback):
    """Record, during `trainer.train()`, how far weights that are not LoRA factors move on protected directions.

    It wraps `record_steps`, for methods such as OSF that train the weights themselves. For LoRA list `StepRecorder` last in
    `ProtectionCallback([...])` instead, which also sees each step before it is projected.

    Args:
        layers: Layer path -> module or tensor to watch, or a function that makes that mapping from the model.
        belief: The directions that are taken to be protected, as `record_steps` takes them.
        path: The JSON Lines file to write.
        every: Optimizer steps between two recorded lines.

    Example:
        >>> from anchorlora.integrations.trainer import StepRecorderCallback
        >>> callback = StepRecorderCallback({"head": torch.nn.Linear(4, 4)}, {}, tmp / "audit.jsonl", every=10)
        >>> callback.every  # Trainer(.., callbacks=[callback])
        10
    """

    def __init__(
        self,
        layers: Callable[[nn.Module], Mapping[str, Any]] | Mapping[str, nn.Module | Tensor | Callable[[], Tensor]],
        belief: DirectionSource | Mapping[str, Protected],
        path: Path,
        *,
        every: int = 1,
    ) -> None:
        self.layers, self.belief, self.path, self.every = layers, belief, path, every
        self.stack = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **_: Any) -> None:
        """Start to record.

        Args:
            args: The trainer's arguments.
            state: The trainer's state.
            control: The trainer's control.
            model: The model that trains.
            optimizer: The trainer's optimizer.
        """
        self.stack.close()
        layers = self.layers(model) if callable(self.layers) else self.layers
        self.stack.enter_context(record_steps(innermost(optimizer), layers, self.belief, self.path, every=self.every))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop recording.

        Args:
            args: The trainer's arguments.
            state: The trainer's state.
            control: The trainer's control.
        """
        self.stack.close()
