"""Adapted layers of a model, and the anchor of a task: all that a constraint may see.

AdaptedLayer   one layer with an adapter: live factors, their start, the frozen history, the protected subspace
Anchor         all adapted layers of a model, and what a constraint may see besides
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anchorlora.adapters.gates import Gated, Gates
from anchorlora.adapters.guard import WholeLayer, active_adapters, refuse_unprotectable
from anchorlora.adapters.kinds import adapters_at, block_factors, kind_of
from anchorlora.adapters.sharding import is_sharded, is_split, local, refuse_flat_parameters
from anchorlora.adapters.targets import keep_unpacked
from anchorlora.devices import true_precision
from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.geometry import Factors, Product, Subspace

NOTHING: Mapping[str, Any] = MappingProxyType({})
COMPILED = "_orig_mod."  # torch.compile adds this to the paths of layers that it wraps


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """One layer with an adapter, during one task.

    `Anchor.of` makes these for a PEFT model. Factors without a model, as in a test of a constraint, can be wrapped directly.

    Args:
        name: Path of the layer in the base model, such as "model.layers.0.self_attn.q_proj".
        current: Live factors A (r, d_in) and B (d_out, r) of the adapter that trains.
        start: Copies of them from the start of the task; `Retract` moves both together.
        history: Stacked factors of earlier adapters, frozen; None if there are none.
        core: Protected subspace of width d_in; None for the first task.
        wide: Wider basis of the strongest directions, up to 64 in the study; None unless a constraint needs it.
        gated: Gates of stacked adapters; None if every adapter counts fully.
        whole: The rest of the layer as it was at the anchor; None for factors without a model.

    Example:
        >>> from anchorlora import Anchor
        >>> layer = Anchor.of(tiny()).layers[0]
        >>> layer.name
        'model.layers.0.self_attn.q_proj'
        >>> layer.current.A.shape, layer.current.B.shape
        (torch.Size([4, 32]), torch.Size([32, 4]))
        >>> with torch.no_grad():
        ...     _ = layer.factor("B").add_(0.01)  # an optimizer step
        >>> bool(layer.change().norm() > 0)
        True
    """

    name: str
    current: Factors
    start: Factors
    history: Factors | None = None
    core: Subspace | None = None
    wide: Subspace | None = None
    gated: Gated | None = None
    whole: WholeLayer | None = None

    def factor(self, name: str) -> nn.Parameter:
        """Return a live factor.

        Args:
            name: "A" or "B".

        Raises:
            UnknownName: `name` is another name.
        """
        return self._named(self.current, name)

    def start_factor(self, name: str) -> Tensor:
        """Return a factor's value at the start of the task.

        Args:
            name: "A" or "B".

        Raises:
            UnknownName: `name` is another name.
        """
        return self._named(self.start, name)

    def is_split(self, name: str) -> bool:
        """Return True if this process holds only some rows of the factor (FSDP2).

        Args:
            name: "A" or "B".
        """
        return is_sharded(self.factor(name))

    def rows(self, name: str) -> Tensor:
        """Return the rows of a live factor that this process holds: all of them, unless FSDP2 has split it.

        The result shares memory with the parameter, so writing to it moves the parameter.

        Args:
            name: "A" or "B".

        Example:
            >>> from anchorlora import Anchor
            >>> model = tiny()
            >>> layer = Anchor.of(model, cores=cores_of(model)).layers[0]
            >>> with torch.no_grad():
            ...     _ = layer.rows("A").copy_(layer.core.outside(layer.rows("A")))  # off the core
            >>> bool((layer.current.A @ layer.core.basis).norm() < 1e-5)
            True
        """
        return local(self.factor(name))

    def gradient_rows(self, name: str) -> Tensor | None:
        """Return the same rows of the factor's gradient, or None if it has no gradient.

        Args:
            name: "A" or "B".
        """
        gradient = self.factor(name).grad
        return None if gradient is None else local(gradient)

    def start_rows(self, name: str) -> Tensor:
        """Return the same rows of the factor at the start of the task.

        Args:
            name: "A" or "B".
        """
        return local(self.start_factor(name))

    def base_weight(self) -> Tensor:
        """Return the layer's frozen weight (d_out, d_in) as the layer computes with it: whole, and out of its 4 or 8 bits.

        A weight that is split over processes is gathered, so all processes must call this.

        Raises:
            InvalidValue: The factors belong to no PEFT layer, whose weight would be known.

        Example:
            >>> from anchorlora import Anchor
            >>> Anchor.of(tiny()).layers[1].base_weight().shape
            torch.Size([16, 32])
        """
        if self.whole is None:
            raise InvalidValue(f"the frozen weight of {self.name} is not known: it is not a PEFT layer; use Anchor.of(model)")
        base: Any = self.whole.base
        weight = base.weight.detach()
        if weight.dtype == torch.int8:  # PEFT's way would take the scales away from the layer on a CPU
            scales = base.weight.SCB if base.weight.SCB is not None else base.state.SCB  # where the first forward pass puts them
            weight = weight.float() * (scales.float()[:, None] / 127)
        elif not weight.is_floating_point():
            weight = dequantize_module_weight(base).detach()
        weight = weight.full_tensor() if is_sharded(weight) else weight
        return weight.T if isinstance(base, Conv1D) else weight

    def change(self, live: Factors | None = None) -> Product:
        """Return the layer's effective change since the start of the task, s (B A - B_0 A_0).

        Factors that are split over processes are gathered, so all processes must call this.

        Args:
            live: Factors that the model computes with, if the training loop has replaced the current ones or their scale.

        Returns:
            The change as a thin product, in float64. With gates it includes the change of earlier adapters.
        """
        now, start = (live or self.current).whole(), self.start.whole()
        return self.gated.change(now, start, self.history) if self.gated else now.since(start)

    def block_change(self) -> Product:
        """Return the current adapter's part of the change; with gates, earlier adapters change as well."""
        now, start = self.current.whole(), self.start.whole()
        return self.gated.block(now, start) if self.gated else now.since(start)

    def _named(self, factors: Factors, name: str) -> Any:
        if name not in ("A", "B"):
            raise UnknownName(f'a LoRA adapter has factors "A" and "B", not {name!r}')
        return getattr(factors, name)


@dataclass(frozen=True, eq=False)
class Anchor:
    """Adapted layers with their factors at the start of a task and the directions to protect: all that a constraint may see.

    Make one with `Anchor.of(model)` right before training, after all wrapping, and give it to `protect`.

    Args:
        layers: All adapted layers, in the model's order.
        model: The model, for constraints that run it; None if only factors matter.
        past: Tensors that constraints remembered at the end of earlier tasks, by name.
        losses: Function of a count n: the losses of n single training examples of this task, one at a time, without dropout and
            with a graph. None if the task gives none. If it has a method `together(n)`, which yields vectors of losses, each of
            several examples in one row without padding, what sums over examples takes that, which is faster.
        adapter_name: Name of the adapter in `model` that the layers belong to.

    Example:
        >>> from anchorlora import Anchor, ProjectDisplacement, protect
        >>> model = tiny()
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> parameters = [p for p in model.parameters() if p.requires_grad]
        >>> optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        >>> ids = torch.randint(0, 64, (2, 8))
        >>> with protect(optimizer, anchor, [ProjectDisplacement("A")]):
        ...     for _ in range(3):
        ...         model(input_ids=ids, labels=ids).loss.backward()
        ...         _ = optimizer.step()
        ...         optimizer.zero_grad()
        >>> layer = anchor.layers[0]
        >>> moved = layer.current.A - layer.start.A
        >>> bool(moved.norm() > 0), bool((moved @ layer.core.basis).norm() < 1e-5)  # A moved, but not along the core
        (True, True)
    """

    layers: tuple[AdaptedLayer, ...]
    model: nn.Module | None = None
    past: Mapping[str, Tensor] = field(default_factory=dict)
    losses: Callable[[int], Iterable[Tensor]] | None = None
    adapter_name: str | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        adapter_name: str | None = None,
        cores: Mapping[str, Subspace] = NOTHING,
        wides: Mapping[str, Subspace] = NOTHING,
        history: str | None = None,
        past: Mapping[str, Tensor] = NOTHING,
        losses: Callable[[int], Iterable[Tensor]] | None = None,
        gates: Gates | None = None,
    ) -> Anchor:
        """Return the anchor of one adapter of a PEFT model: its layers, with their present factors as the start.

        Call it after all wrapping. If anything trains, 4-bit base weights are kept in the layout that passes gradients on.

        Args:
            model: A PeftModel, or what wraps one (DDP, torch.compile, a LightningModule).
            adapter_name: Adapter that trains; by default the active one.
            cores: Protected subspaces by layer path in the base model, for every adapted layer; none for the first task.
            wides: Wider bases by layer path, for constraints that need them.
            history: Name of the adapter that holds the rows of earlier adapters, frozen.
            past: Tensors that constraints remembered at the end of earlier tasks.
            losses: Losses of single training examples, as in `Anchor`.
            gates: Gates of the history and the current adapter.

        Returns:
            The anchor, with copies of the present factors.

        Raises:
            UnknownName: The model has no such adapter, several could be meant, or `cores` or `wides` are for other layers.
            InvalidValue: The adapter is not active or is merged, a core has another width than the layer's input, or a 4-bit base
                passes no gradient.
            InvalidType: A layer's update is not a product s B A (DoRA and other variants), or the factors lie in flat buffers
                (FSDP1, DeepSpeed ZeRO).

        Example:
            >>> from anchorlora import Anchor
            >>> model = tiny()
            >>> anchor = Anchor.of(model, cores=cores_of(model, k=3))
            >>> for layer in anchor.layers[:2]:
            ...     print(layer.name, layer.current.rank, layer.core.k)
            model.layers.0.self_attn.q_proj 4 3
            model.layers.0.self_attn.v_proj 4 3
            >>> Anchor.of(model, adapter_name="other")
            Traceback (most recent call last):
                ...
            anchorlora.errors.UnknownName: the model has no LoRA adapter called 'other'; it has: default
        """
        refuse_flat_parameters(model)
        if any(parameter.requires_grad for parameter in model.parameters()):
            keep_unpacked(model)
        found, split = lora_layers(model), is_split(model)
        adapter_name = adapter_name or _training_adapter(found)
        modules = {name: module for name, module in found.items() if adapter_name in adapters_at(module)}
        if not modules:
            raise UnknownName(
                f"the model has no LoRA adapter called {adapter_name!r}; it has: {', '.join(_known(found)) or 'none'}"
            )
        for kind, given in (("cores", cores), ("wide bases", wides)):
            if given and set(given) != set(modules):
                raise UnknownName(other_layers(kind, set(given), set(modules)))
        layers = []
        for name, module in modules.items():
            gated = Gated(gates, gates.multipliers(name).detach().clone(), name) if gates else None
            core, wide = cores.get(name), wides.get(name)
            earlier = history if history in adapters_at(module) else None
            for adapter in filter(None, (adapter_name, earlier)):
                refuse_unprotectable(name, module, adapter)
            current = block_factors(module, adapter_name)
            frozen = block_factors(module, earlier) if earlier else None
            for directions in (core, wide):
                if directions is not None and directions.d != current.A.shape[1]:
                    raise InvalidValue(
                        f"the core of {name} has width {directions.d}, but its A reads {current.A.shape[1]} inputs; "
                        "these cores belong to another model"
                    )
            whole = None
            if isinstance(module, LoraLayer):
                with true_precision({current.A.device.type}):
                    whole = WholeLayer.of(name, module, adapter_name, core=core, gated=gates is not None, split=split)
            layers.append(AdaptedLayer(name, current, current.copy(), frozen, core, wide, gated, whole))
        return cls(tuple(layers), model, past, losses, adapter_name)

    def ending_at(self, factors: Mapping[str, Factors]) -> Anchor:
        """Return an anchor whose change is that of the whole stack: from the history at the task's start to given factors.

        Args:
            factors: Layer path -> factors of the whole stack at the end of the task, of any rank.

        Example:
            >>> from anchorlora import AdapterStack
            >>> stack = AdapterStack(tiny().unload(), targets=("q_proj",), rank=4, alpha=8)
            >>> stack.fold()
            >>> stack.open(torch.Generator().manual_seed(1))  # task 2
            >>> anchor = stack.anchor()
            >>> layer = anchor.ending_at(stack.factors()).layers[0]
            >>> layer.current.rank, layer.start.rank, float(layer.change().norm())
            (8, 4, 0.0)
        """
        ends = []
        for layer in self.layers:
            end = factors[layer.name]
            start = layer.history.copy() if layer.history is not None else end.unborn()
            ends.append(AdaptedLayer(layer.name, end, start, None, layer.core, layer.wide))
        return Anchor(tuple(ends), past=self.past)

    def changed(self) -> list[str]:
        """Return one sentence per layer in which anything but the protected factors has changed since the anchor."""
        if self.model is None or self.adapter_name is None:
            return []
        layers = lora_layers(self.model)
        devices = {layer.current.A.device.type for layer in self.layers}
        with true_precision(devices):
            said = [layer.whole.changed(layers.get(layer.name)) for layer in self.layers if layer.whole is not None]
        return [sentence for sentence in said if sentence]

    def trains_beside(self) -> dict[str, nn.Parameter]:
        """Return every trainable parameter of the model that is not a protected factor, by name."""
        if self.model is None or self.adapter_name is None:
            return {}
        factors = {id(layer.factor(name)) for layer in self.layers for name in ("A", "B")}
        return {n.replace(COMPILED, ""): p for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in factors}

    def replaced(self) -> str | None:
        """Return the name of the first layer whose factors in the model are no longer those of the anchor, or None."""
        if self.model is None or self.adapter_name is None:
            return None
        layers = lora_layers(self.model)
        for layer in self.layers:
            live = self._in_model(layers.get(layer.name))
            if live is None:
                return layer.name
            for name, parameter in (("A", live.A), ("B", live.B)):
                gathered = is_sharded(layer.factor(name)) and not is_sharded(parameter)  # FSDP2 shows the whole factor for a while
                if parameter is not layer.factor(name) and not gathered:
                    return layer.name
        return None

    def live(self) -> dict[str, Factors]:
        """Return the factors that the model computes with now, by layer; they differ if the training loop has replaced them."""
        if self.model is None or self.adapter_name is None:
            return {}
        layers = lora_layers(self.model)
        found = {layer.name: self._in_model(layers.get(layer.name)) for layer in self.layers}
        return {path: factors for path, factors in found.items() if factors is not None}

    def _in_model(self, module: nn.Module | None) -> Factors | None:
        if module is None or self.adapter_name is None or self.adapter_name not in adapters_at(module):
            return None
        return block_factors(module, self.adapter_name)


def _training_adapter(layers: Mapping[str, Any]) -> str:
    """The active adapter that trains, or the only active one.  Raises UnknownName if several could be meant."""
    active = active_adapters(layers)
    training = [name for name in active if any(_trains(module, name) for module in layers.values())]
    meant = training or active
    if not active:
        raise UnknownName(f"the model has no active LoRA adapter; it has: {', '.join(_known(layers)) or 'none'}")
    if len(meant) != 1:
        named = ", ".join(map(repr, meant)) or "none"
        raise UnknownName(
            f"give the name of the adapter to protect: {len(meant)} adapters {'train' if training else 'are active'} ({named})"
        )
    return meant[0]


def _trains(module: nn.Module, adapter: str) -> bool:
    factors = block_factors(module, adapter) if adapter in adapters_at(module) else None
    return factors is not None and (factors.A.requires_grad or factors.B.requires_grad)


def _known(layers: Mapping[str, Any]) -> list[str]:
    return sorted({name for module in layers.values() for name in adapters_at(module)})


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the adapted layers by their path in the base model, in the model's order, whatever wraps the PEFT model.

    Args:
        model: A PeftModel, what wraps one, or a model with layers of any kind in `LAYER_KINDS` in it.

    Returns:
        Layer path -> its module, such as PEFT's LoRA layer; empty if the model has no adapter.

    Raises:
        UnknownName: The model holds several PEFT models.

    Example:
        >>> from anchorlora.adapters import lora_layers
        >>> list(lora_layers(tiny()))[:2]
        ['model.layers.0.self_attn.q_proj', 'model.layers.0.self_attn.v_proj']
    """
    base = base_model_in(model)
    return {name.replace(COMPILED, ""): module for name, module in base.named_modules() if kind_of(module) is not None}


def base_model_in(model: nn.Module) -> nn.Module:
    """Return the base model inside a PEFT model, whatever wraps that; a model without PEFT is returned itself.

    Args:
        model: A PeftModel, what wraps one, or a plain model.

    Raises:
        UnknownName: The model holds several PEFT models.

    Example:
        >>> from anchorlora.adapters.layers import base_model_in
        >>> type(base_model_in(tiny())).__name__
        'Qwen3ForCausalLM'
    """
    adapted = [module for module in model.modules() if isinstance(module, PeftModel)]
    if len(adapted) > 1:
        raise UnknownName(f"{type(model).__name__} holds {len(adapted)} PEFT models; give the one that trains")
    return adapted[0].base_model.model if adapted else model


def other_layers(kind: str, given: set[str], adapted: set[str]) -> str:
    """Return an error message for values that were given for other layers than the adapted ones.

    Args:
        kind: Kind of the values, such as "cores".
        given: Paths of the layers that have a value.
        adapted: Paths of the adapted layers.
    """
    missing, unknown = sorted(adapted - given), sorted(given - adapted)
    parts = [f"no {kind} for {missing[0]} and {len(missing) - 1} others"] if missing else []
    parts += [f"{kind} for {unknown[0]} and {len(unknown) - 1} others, which are not adapted"] if unknown else []
    return f"{kind} and adapter do not fit: " + "; ".join(parts)
