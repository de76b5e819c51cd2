"""Where a step stopped being finite: its micro-batches are read once more, with hooks on all layers.

parameter   holds NaN or infinity
layer       the first whose output, or else whose input, is not finite, in the order of the forward pass
loss        of the task, or what a constraint adds to it
gradient    the first on the way back
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anchorlora.adapters import Anchor, lora_layers
from anchorlora.adapters.layers import COMPILED, base_model_in
from anchorlora.constraints import ActiveConstraint
from anchorlora.continual.batches import IGNORED, Loss, MicroBatch, Window, example_losses
from anchorlora.devices import forked_generators, set_generator_states, type_name
from anchorlora.features.collector import not_collecting
from anchorlora.models.failures import first_line
from anchorlora.models.packing import packed
from anchorlora.processes import ALONE, Processes


@dataclass(frozen=True, eq=False)
class StepAgain:
    """An optimizer step that can be read again."""

    model: nn.Module
    anchor: Anchor  # its adapted layers, for the names of factors
    window: Window
    loss: Loss  # returns a micro-batch's share of its window's loss
    active: Sequence[ActiveConstraint]  # the constraints that hold
    backward: Callable[[MicroBatch], Any]  # makes the gradients of a micro-batch, by a forward and a backward pass
    states: Mapping[str, Tensor]  # random generators as the step found them: dropout draws the same again
    processes: Processes = ALONE  # those that train together

    def in_a_forward_pass(self) -> str:
        """Return what was not finite first, if only this process has met it; nothing is read of a split model, which needs all
        processes.
        """
        if self.processes.sharded:
            return ""
        sentence = self._first(self._in_forward) or f"read again, every layer and the loss are finite{self._how()}"
        return self._explain(self._parameter(), sentence)

    def in_the_whole_step(self) -> str:
        """Return what was not finite first, at which example, in which precision, and what to try; all processes must call it."""
        agreed = self.processes.agreed
        sentence = agreed(self._first(self._in_forward)) or self._in_the_gradients()
        sentence = sentence or f"read again, every layer, the loss and every gradient are finite{self._how()}"
        return self._explain(agreed(self._parameter()), sentence)

    def _explain(self, parameter: str | None, sentence: str) -> str:
        if parameter is None:
            return f"{sentence}; {self._remedy()}"
        return (
            f"{parameter} holds NaN or infinite values: a step overflowed, or something other than the optimizer wrote it; "
            f"{sentence}"
        )

    def _in_the_gradients(self) -> str | None:
        """The first gradient that is not finite on the way back, and the micro-batch that makes it so."""
        trained = [(name, p) for name, p in self._parameters() if p.grad is not None]

        def wrong() -> str | None:
            """The last factor, so the first on the way back, whose gradient is not finite."""
            return next((name for name, p in reversed(trained) if not _finite(p.grad)), None)

        def look_at_gradients(batch: MicroBatch) -> str | None:
            """Return a sentence on the gradients of one micro-batch, if one is not finite."""
            for _, p in trained:
                p.grad = None
            self.backward(batch)
            name = wrong()
            return name and f"every layer and the loss are finite, and the gradient of {name} is not{self._at(batch)}"

        if (name := self.processes.agreed(wrong())) is None:
            return None
        sentence = self.processes.agreed(self._first(look_at_gradients))
        return sentence or f"every layer and the loss are finite, and the gradient of {name} is not{self._how()}"

    def _first(self, look: Callable[[MicroBatch], str | None]) -> str | None:
        """Return the sentence of `look` at the first micro-batch where it has one; a split model is read to the end."""
        device, sentence = next(self.model.parameters()).device, None
        self.model.train()
        with forked_generators(), not_collecting():
            set_generator_states(device, self.states)
            for i, batch in enumerate(self.window.micro_batches):
                if sentence is not None and not self.processes.sharded:
                    break
                try:
                    seen = look(batch.to(device))
                except Exception as error:  # what a layer does with NaN is its own affair
                    seen = f"the step cannot be read again ({first_line(error)}){self._at(batch)}"
                sentence = sentence or (seen if i < self.window.full else None)
        return sentence

    @torch.no_grad()
    def _in_forward(self, batch: MicroBatch) -> str | None:
        seen: list[_NotFiniteTensor] = []
        try:
            with packed(self.model, batch.layout, batch.kept):
                with _listening(self.model, batch, seen):
                    outputs = self.model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
                _look(seen, batch, "every layer is finite and the logits are not", outputs.logits)
                if not seen:
                    return self._loss(batch, outputs)
        except Exception:
            if not seen:
                raise
        return f"{seen[0].what}{self._at(batch, seen[0].examples, seen[0].dtype)}"

    def _loss(self, batch: MicroBatch, outputs: Any) -> str | None:
        dtype = outputs.logits.dtype
        if not math.isfinite(float(self.loss(outputs.logits, batch, self.window))):
            wrong = (~torch.isfinite(example_losses(outputs.logits, batch))).nonzero().flatten().tolist()
            return f"every layer is finite and the loss is not{self._at(batch, wrong, dtype)}"
        for c in () if self.processes.sharded else self.active:  # what they read of a split model is read in all processes
            if not math.isfinite(float(c.loss(batch, outputs))):
                name = type(c).__name__.strip("_")
                return f"every layer and the loss are finite, and what {name} adds to it is not{self._at(batch, (), dtype)}"
        return None

    def _at(self, batch: MicroBatch, examples: Sequence[int] = (), dtype: torch.dtype | None = None) -> str:
        """The place of the examples, all of the micro-batch by default, and how they were read."""
        some = examples or range(len(batch))
        first = batch.places[some[0]] if batch.places else f"example {some[0] + 1} of the micro-batch"
        others = f" and {len(some) - 1} more of the {len(batch)} read with it" if len(some) > 1 else ""
        return f", at {first}{others}{self._how(dtype)}"

    def _how(self, dtype: torch.dtype | None = None) -> str:
        return f" ({type_name(dtype or self._dtype)}, {'packed' if self._packed else 'padded'})"

    @property
    def _packed(self) -> bool:
        return any(batch.layout is not None for batch in self.window.micro_batches)

    @property
    def _dtype(self) -> torch.dtype:
        """Precision of the base model."""
        own = base_model_in(self.model)
        return getattr(own, "dtype", None) or next(own.parameters()).dtype

    def _remedy(self) -> str:
        switches = ["--set dtype=float32"] * (self._dtype != torch.float32)
        switches += ["--set batching=padded"] * self._packed
        if not switches:
            return "try a smaller learning_rate, or leave the example out"
        return f"try {' or '.join(switches)}"

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters in the model's order: factors as A or B at their layer, others by their path in the base model."""
        factors = {id(layer.factor(name)): f"{name} at {layer.name}" for layer in self.anchor.layers for name in ("A", "B")}
        for name, p in base_model_in(self.model).named_parameters():
            yield factors.get(id(p), name.replace(".base_layer", "")), p

    def _parameter(self) -> str | None:
        """The first parameter that is not finite; of quantized weights the bits may be stored as any type, and are no numbers."""
        wide = ((name, p) for name, p in self._parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
        return next((name for name, p in wide if not hasattr(p, "quant_state") and not _finite(p)), None)


@dataclass(frozen=True, eq=False)
class _NotFiniteTensor:
    """The first tensor that was not finite: in words, with the examples of the micro-batch that have it."""

    what: str
    examples: Sequence[int]
    dtype: torch.dtype


@contextmanager
def _listening(model: nn.Module, batch: MicroBatch, seen: list[_NotFiniteTensor]) -> Iterator[None]:
    """Look at what every layer reads and gives; an adapted layer is one, whatever it consists of."""
    adapted = tuple(f"{name}." for name in lora_layers(model))

    def reads(name: str, _: nn.Module, args: tuple, kwargs: dict) -> None:
        _look(seen, batch, f"{name} is the first layer that reads what is not finite", (*args[:1], kwargs.get("hidden_states")))

    def gives(name: str, _: nn.Module, args: tuple, output: Any) -> None:
        _look(seen, batch, f"{name} is the first layer whose output is not finite", output)

    with ExitStack() as hooks:
        for path, layer in base_model_in(model).named_modules():
            name = path.replace(COMPILED, "")
            if name and not name.startswith(adapted):
                hooks.enter_context(layer.register_forward_pre_hook(partial(reads, name), with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(partial(gives, name)))
        yield


def _look(seen: list[_NotFiniteTensor], batch: MicroBatch, what: str, values: Any) -> None:
    for tensor in _floats(values) if not seen else ():
        if examples := _not_finite_examples(batch, tensor):
            kind = "NaN" if bool(tensor.isnan().any()) else "infinite"
            seen.append(_NotFiniteTensor(f"{what} ({kind})", examples, tensor.dtype))
            return


def _floats(values: Any) -> Iterator[Tensor]:
    """The tensors of floating-point numbers in what a layer reads or gives."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _floats(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _floats(value)


def _not_finite_examples(batch: MicroBatch, x: Tensor) -> Sequence[int]:
    """The examples in whose rows x is not finite; all where x does not show its rows.  Padding counts for nothing."""
    wrong, ids = ~torch.isfinite(x), batch.inputs["input_ids"]
    if not bool(wrong.any()):
        return ()
    if len(wrong) == ids.numel() > len(ids):  # some layers read all tokens in one row, as OPT's fc1
        wrong = wrong.view(*ids.shape, -1)
    every = range(len(batch))
    if wrong.ndim < 2 or len(wrong) != len(ids):
        return every
    wrong = wrong.flatten(2).any(2) if wrong.ndim > 2 else wrong
    parts: Sequence[Tensor] = tuple(wrong)
    if batch.layout is None and wrong.shape == ids.shape and "attention_mask" in batch.inputs:
        parts = tuple(wrong & batch.inputs["attention_mask"].bool())
    if batch.layout is not None and wrong.shape == ids.shape:
        prefix, parts = batch.layout.parts(wrong[0], 0)
        if bool(prefix.any()):
            return every
        parts = [part for part, turns in zip(parts, batch.chats, strict=True) for part in [part] * turns]
    elif batch.layout is not None:
        answers = (batch.targets != IGNORED).sum(1).tolist()
        if sum(answers) != wrong.shape[1]:
            return every
        parts = wrong[0].split(answers)
    return [i for i, part in enumerate(parts) if bool(part.any())]


def _finite(tensor: Tensor | None) -> bool:
    """Return True if all that this process holds of a tensor is finite."""
    if tensor is None:
        return True
    local = tensor.detach()
    return bool(torch.isfinite(local.to_local() if hasattr(local, "to_local") else local).all())
