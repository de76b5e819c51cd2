"""Hooks of one task: they take feature rows from the inputs of adapted layers while the model trains or reads.

a layer reads                          its rows are
(examples, tokens, d_in)               tokens of examples; those that the attention mask leaves out are skipped
(examples x tokens, d_in)              the same: some layers read all examples in one row, as OPT's fc1 and shared experts do
(n, d_in), the tokens of an expert     tokens of no known example: padding among them cannot be told, so none may be there

A layer that a forward calls again, as a looped model does, has a quota for each call: the first alone would fill one.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anchorlora.adapters import lora_layers
from anchorlora.adapters.guard import refuse_not_linear
from anchorlora.adapters.kinds import adapters_at
from anchorlora.adapters.layers import whole_models_in
from anchorlora.errors import InvalidValue, NotFinite, UnknownName
from anchorlora.features.layout import current as packed_layout
from anchorlora.processes import ALONE, Processes

PER_EXAMPLE = 4  # held-out rows per example, spread over its tokens: the first tokens are the prompt that all examples share
APART = 4  # of so many examples one is held out, where rows are spread over all of them
AGAIN = "#"  # in the name of the rows of a layer's second call in a forward, third, ..
EXPERT = re.compile(r"(^|\.)(?!shared)\w*experts?\.\d+(\.|$)")  # path of an expert, whatever the number of tokens that it reads


@dataclass(eq=False)
class TaskRows:
    """Feature rows of one task by store: (n, d_in) each, float32, on the CPU."""

    core: dict[str, Tensor] = field(default_factory=dict)  # rows that cores are made from
    held_out: dict[str, Tensor] = field(default_factory=dict)  # rows kept apart, for measuring only


def reading_layers(model: nn.Module) -> dict[str, Any]:
    """Return the adapted layers that read rows; an embedding reads numbers of tokens."""
    return {name: layer for name, layer in lora_layers(model).items() if adapters_at(layer)}


class Collector:
    """Hooks of one task. They take rows only in a forward pass of the whole model in the expected mode, not in one that activation
    checkpointing repeats in the backward pass.
    """

    # mask (examples, tokens) of the tokens to take, or their places (n,) in a packed row; the attention mask if None
    chosen: Tensor | None = None
    mask: Tensor | None = None  # of the present forward
    shape: tuple[int, int] | None = None  # (examples, tokens) of the present forward

    def __init__(
        self,
        model: nn.Module,
        *,
        stores: dict[str, str],
        limit: int,
        held_out: int,
        spread: bool,
        passed_over: bool = False,
        training: bool = True,
        processes: Processes = ALONE,
    ) -> None:
        if spread and (processes.count > 1 or passed_over):
            of_whom = "rows of several processes and rows that are only counted"
            raise InvalidValue(f"{of_whom} are the first ones: give FeatureStore(.., spread=False)")
        self.stores, self.limit, self.held_out, self.spread, self.passed_over = stores, limit, held_out, spread, passed_over
        self.samples: dict[str, tuple[Sample, Sample]] = {}  # where rows are spread: for cores, and held out
        self.inside, self.training, self.processes = False, training, processes
        self.room: dict[str, int] = {}  # core rows that a store may still take, and held-out rows
        self.wanted: dict[str, int] = {}
        self.offered: dict[str, list[ExampleRows]] = {}  # by this process, for the first one
        self.core: dict[str, list[Tensor]] = {}
        self.held: dict[str, list[Tensor]] = {}
        self.readers: dict[tuple[int, float], tuple[Tensor, str]] = {}  # during one forward: input tensor as it is -> store
        self.calls = Counter[str]()  # during one forward
        refuse_encoder(model)
        self.layers = reading_layers(model)
        if not self.layers:
            raise UnknownName("the model has no LoRA layer to collect feature rows from")
        if not set(stores) <= set(self.layers):
            raise UnknownName("the rows so far were collected from a model with other adapted layers")
        for name, layer in self.layers.items():
            refuse_not_linear(name, layer)
        self.eager = ExitStack()  # what was compiled before runs no hooks that came later
        self.eager.enter_context(torch.compiler.set_stance("force_eager"))
        self.hooks = [model.register_forward_pre_hook(self._enter, with_kwargs=True)]
        self.hooks.append(model.register_forward_hook(self._leave, always_call=True))
        for whole in whole_models_in(model):  # a wrapper may have arguments of its own
            names = list(inspect.signature(whole.forward).parameters)
            self.hooks.append(whole.register_forward_pre_hook(partial(self._read, names), with_kwargs=True))
        for name, layer in self.layers.items():
            if stores.get(name, name) == name:  # the others read what this one reads
                self.hooks.append(layer.register_forward_pre_hook(partial(self._keep, name)))

    @property
    def closed(self) -> bool:
        """True once no hook is left."""
        return not self.hooks

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.readers, self.mask = [], {}, None
        self.eager.close()

    def collected(self) -> TaskRows:
        """Return the rows; a layer that read nothing has a store without rows."""
        for name in self.layers:
            self.stores.setdefault(name, name)
        if self.spread:
            core, held = ({key: (pair[i].rows, pair[i].drawn) for key, pair in self.samples.items()} for i in (0, 1))
        else:
            kept = join_rows(self.core), join_rows(self.held)
            core, held = ({key: (rows, torch.arange(len(rows), device="cpu")) for key, rows in part.items()} for part in kept)
        return TaskRows({} if self.passed_over else _of_all_calls(core, self.limit), _of_all_calls(held, self.held_out))

    def for_core(self, rows: Tensor) -> Tensor:
        """Return rows as they are held for cores: (n, d_in), or (n, 0) where they are only counted."""
        return rows.new_empty(len(rows), 0) if self.passed_over else rows

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        self.inside = model.training == self.training and not _RESTING.get()
        self.mask, self.shape, self.calls = self.chosen, None, Counter()

    def _read(self, names: list[str], model: nn.Module, given: tuple, kwargs: dict) -> None:
        """Take mask and shape from the arguments of the model, or of what wraps it: the outermost that gives them."""
        by_name = {**dict(zip(names, given, strict=False)), **kwargs}
        mask = by_name.get("attention_mask")
        if self.inside and self.mask is None and mask is not None:
            if mask.ndim != 2:
                raise InvalidValue(f"feature rows need an attention mask of shape (examples, tokens), not {tuple(mask.shape)}")
            self.mask = mask
        read = next((x for x in (by_name.get("input_ids"), by_name.get("inputs_embeds"), *given[:1]) if x is not None), None)
        if self.shape is None and isinstance(read, Tensor) and read.ndim == 2 + read.is_floating_point():
            self.shape = read.shape[0], read.shape[1]

    def _leave(self, model: nn.Module, args: tuple, output: object) -> None:
        if not self.inside:
            return
        self.inside, self.readers = False, {}
        if self.processes.count == 1:
            self._close_if_full()

    def _close_if_full(self) -> None:
        if self.spread or len(self.stores) < len(self.layers):  # an expert may not have been chosen yet
            return
        left = [places.get(key, 1) for key in {*self.stores.values(), *self.room} for places in (self.room, self.wanted)]
        if max(left) <= 0:
            self.close()

    def count(self) -> None:
        """Count the rows that are there already, as of an interrupted block, toward the limits."""
        for store in {*self.core, *self.held}:
            self.room[store] = self.limit - sum(map(len, self.core.get(store, ())))
            self.wanted[store] = self.held_out - sum(map(len, self.held.get(store, ())))

    def join(self) -> None:
        """Take what the processes have offered, those of the first rank first, as one process would have read them."""
        if self.closed or self.processes.count == 1:
            return
        for stores, offered in self.processes.sent_to_first((self.stores, self.offered)):
            for layer, store in stores.items():
                self.stores.setdefault(layer, store)
            for store, offers in offered.items():
                for offer in offers:
                    self._accept(store, offer)
        self.count()
        self.offered = {}
        stores, self.room, self.wanted = self.processes.told(lambda: (self.stores, self.room, self.wanted))
        self.stores.update(stores)
        self._close_if_full()

    def _accept(self, store: str, offer: ExampleRows) -> None:
        core, held = self.core.setdefault(store, []), self.held.setdefault(store, [])
        room, wanted = self.limit - sum(map(len, core)), self.held_out - sum(map(len, held))
        if room > 0:
            core.append(offer.first[:room])
        elif wanted > 0 and offer.spread:
            held.append(offer.spread[min(wanted, len(offer.spread)) - 1])

    def _keep(self, layer: str, module: nn.Module, args: tuple) -> None:
        if not self.inside:
            return
        inputs: Tensor = args[0]
        if layer not in self.stores:
            written = float(inputs.sum()) if inputs.is_inference() else inputs._version  # a model may add to it in place
            read = (id(inputs), written)
            known = self.readers.get(read)
            self.stores[layer] = known[1] if known else layer
            self.readers[read] = (inputs, self.stores[layer])  # a reference keeps the id unique
        if self.stores[layer] == layer:
            self.calls[layer] += 1
            key = layer if self.calls[layer] == 1 else f"{layer}{AGAIN}{self.calls[layer]}"
            (self._sample if self.spread else self._take)(layer, key, inputs.detach())

    def _sample(self, store: str, key: str, inputs: Tensor) -> None:
        core, held = self.samples.setdefault(key, (Sample(self.limit), Sample(self.held_out)))
        for valid in self._examples(store, inputs):
            apart = self.held_out and (core.offers + held.offers) % APART == APART - 1
            (held if apart else core).offer(valid, store)

    def _take(self, store: str, key: str, inputs: Tensor) -> None:
        core, held = self.core.setdefault(key, []), self.held.setdefault(key, [])
        self.room.setdefault(key, self.limit)
        self.wanted.setdefault(key, self.held_out)
        if self._full(key):
            return
        for valid in self._examples(store, inputs):
            room, wanted = self.room[key], self.wanted[key]
            spread = min(PER_EXAMPLE, wanted, len(valid))
            if self.processes.count > 1:  # those of a lower rank come first, so this may be taken otherwise, or not at all
                rows = [_finite(_spread(valid, n), store) for n in range(1, min(PER_EXAMPLE, len(valid)) + 1)]
                self.offered.setdefault(key, []).append(ExampleRows(self.for_core(_finite(valid[: max(room, 0)], store)), rows))
            elif room > 0:
                core.append(self.for_core(_finite(valid[:room], store)))
            elif spread > 0:
                held.append(_finite(_spread(valid, spread), store))
            if room > 0:
                self.room[key] -= min(room, len(valid))
            else:
                self.wanted[key] -= spread
            if self._full(key):
                return

    def _full(self, key: str) -> bool:
        return self.room[key] <= 0 and self.wanted[key] <= 0

    def _examples(self, store: str, inputs: Tensor) -> Iterator[Tensor]:
        """Rows (n, d_in) of the valid tokens of each example; all that an expert reads, as one."""
        lead = [n for n in inputs.shape[:-1] if n != 1]  # DeepSeek's kv_b_proj reads (examples, 1, tokens, d_in)
        as_one = len(lead) < 2
        if self.shape is not None and lead == [n for n in self.shape if n != 1] and not (as_one and EXPERT.search(store)):
            inputs = inputs.view(*self.shape, -1)
        elif as_one:
            rows = inputs.flatten(end_dim=-2)
            if self.shape is None or EXPERT.search(store) or len(rows) != math.prod(self.shape):
                yield self._of_an_expert(store, rows)
                return
            inputs = rows.view(*self.shape, -1)
        elif inputs.ndim != 3:
            raise InvalidValue(
                f"feature rows are taken from inputs of shape (examples, tokens, d_in) or (tokens, d_in), but {store} reads "
                f"{tuple(inputs.shape)}; leave this layer out of the targets"
            )
        layout = packed_layout()
        if layout and self.chosen is not None:
            yield inputs[0, self.chosen]
            return
        if self.mask is not None and inputs.shape[:2] != self.mask.shape:
            raise InvalidValue(
                f"{store} reads {tuple(inputs.shape)}, but the attention mask is of {tuple(self.mask.shape)} (examples, tokens): "
                "which of its rows are padding is not known; leave this layer out of the targets"
            )
        for i, rows in enumerate(layout.examples(inputs) if layout else inputs):
            yield rows if self.mask is None else rows[self.mask[i].bool()]

    def _of_an_expert(self, store: str, rows: Tensor) -> Tensor:
        if self.mask is None or bool(self.mask.all()):
            return rows
        raise InvalidValue(
            f"{store} reads the tokens that the model sends to it, and which of them are padding or chosen is not known; take "
            "batches without padding (one example each, or packed rows) and no spread, or leave the experts out of the targets"
        )


_RESTING: ContextVar[bool] = ContextVar("resting", default=False)


@contextmanager
def not_collecting() -> Iterator[None]:
    """Take no rows in the block, where a micro-batch is read once more."""
    token = _RESTING.set(True)
    try:
        yield
    finally:
        _RESTING.reset(token)


@dataclass(frozen=True, eq=False)
class ExampleRows:
    """Rows of one example: the first ones, for a core, and 1, 2, .. spread over its tokens, to be held out."""

    first: Tensor
    spread: list[Tensor]


class Sample:
    """A uniform sample of rows that come example by example: every row draws a number, and the smallest stay, in order. All layer
    inputs share the numbers, so they take the same tokens.
    """

    def __init__(self, size: int) -> None:
        self.size, self.offers, self.bar = size, 0, math.inf if size else -math.inf
        self.generator = torch.Generator().manual_seed(0)
        self.drawn, self.rows = torch.empty(0, dtype=torch.float64, device="cpu"), torch.empty(0, device="cpu")

    def offer(self, rows: Tensor, store: str) -> None:
        """Take some rows of an example (n, d_in), or none."""
        self.offers += 1
        drawn = torch.rand(len(rows), generator=self.generator, dtype=torch.float64, device="cpu")
        below = (drawn < self.bar).nonzero()[:, 0]
        if not len(below):
            return
        taken = _finite(rows[below.to(rows.device)], store)
        self.rows = torch.cat([self.rows, taken]) if len(self.rows) else taken
        self.drawn = torch.cat([self.drawn, drawn[below]])
        if len(self.drawn) >= self.size:
            stay = self.drawn.topk(self.size, largest=False).indices.sort().values
            self.drawn, self.rows = self.drawn[stay], self.rows[stay]
            self.bar = float(self.drawn.max())


def refuse_encoder(model: nn.Module) -> None:
    """Raise if a model has an encoder of its own: its layers read two texts, and one mask does not tell which rows are padding."""
    configs = (getattr(module, "config", None) for module in model.modules())
    # the first one is not that of a part, as of a vision tower
    whole = next((config for config in configs if hasattr(config, "is_encoder_decoder")), None)
    if whole is not None and whole.is_encoder_decoder:
        raise InvalidValue(
            "encoder-decoder models are not supported: their layers read two texts, and feature rows are those of one; give a "
            "causal language model"
        )


def _spread(rows: Tensor, count: int) -> Tensor:
    places = torch.linspace(0, len(rows) - 1, count, device="cpu").round().long()
    return rows[places.to(rows.device)]


def _finite(rows: Tensor, store: str) -> Tensor:
    """Rows in their stored form, float32 on the CPU; half-precision rows that were finite stay finite."""
    kept = rows.float().cpu()
    if not bool(torch.isfinite(kept).all()):
        raise NotFinite(f"feature rows at {store} hold NaN or infinite values")
    return kept


def _of_all_calls(parts: Mapping[str, tuple[Tensor, Tensor]], size: int) -> dict[str, Tensor]:
    """Rows of each store: of a layer that was called several times, of the same tokens in all calls, the first ones in an order."""
    by_store: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for key, part in parts.items():
        if len(part[0]):
            by_store.setdefault(key.partition(AGAIN)[0], []).append(part)
    out = {}
    for store, calls in by_store.items():
        rows, order = map(torch.cat, zip(*calls, strict=True))
        out[store] = rows if len(calls) == 1 else rows[order.argsort(stable=True)[:size]]
    return out


def join_rows(parts: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return the rows of each store as one tensor; stores without rows are left out: `parts` (n, d_in)."""
    return {store: torch.cat(rows) for store, rows in parts.items() if rows}
