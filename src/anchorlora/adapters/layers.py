"""What the rest of the program may see of an adapted model: its sites, and the scope of one task.

Site   one adapted layer: live factors, their anchor, the frozen history, the protected core
Scope  all sites of a model, and what a constraint may see besides
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from anchorlora.adapters.gates import Gated, Gates
from anchorlora.adapters.guard import WholeLayer, active_adapters, refuse_other_kinds
from anchorlora.adapters.sharding import is_sharded, local, refuse_flat_parameters
from anchorlora.adapters.targets import keep_unpacked
from anchorlora.devices import true_precision
from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.geometry import Factors, Product, Subspace

NOTHING: Mapping[str, Any] = MappingProxyType({})
COMPILED = "_orig_mod."  # what torch.compile puts into the path of a layer that it wraps


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """One adapted layer during one task.

    name     path of the module in the base model, such as "model.layers.0.self_attn.q_proj"
    current  live factors A (r, d_in), B (d_out, r) of the block that trains
    start    copies of them at the start of the task; `Retract` moves both together
    history  the stacked history block, or None
    core     protected directions (d_in, k), or None while there is no past;  wide: up to 64 of them
    gated    the gates of a stack of gated blocks, or None: every block counts fully
    whole    what the layer computes beside the current block, as it was at the anchor; None for factors without a model
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
        """The live parameter "A" or "B"."""
        return self._named(self.current, name)

    def start_factor(self, name: str) -> Tensor:
        """The anchor of "A" or "B"."""
        return self._named(self.start, name)

    def is_split(self, name: str) -> bool:
        """Whether this process holds only some rows of the factor (FSDP2)."""
        return is_sharded(self.factor(name))

    def rows(self, name: str) -> Tensor:
        """The rows of the live factor that this process holds: all of them, unless FSDP2 has split it.  Shares its memory."""
        return local(self.factor(name))

    def gradient_rows(self, name: str) -> Tensor | None:
        """The same rows of the factor's gradient, if it has one."""
        gradient = self.factor(name).grad
        return None if gradient is None else local(gradient)

    def start_rows(self, name: str) -> Tensor:
        """The same rows of the anchor."""
        return local(self.start_factor(name))

    def change(self, live: Factors | None = None) -> Product:
        """The layer's effective change since the start of the task, s (B A - B_0 A_0), thin and in float64.

        live: what the model computes with, where a loop has replaced the current factors or their scale. Where factors are split
        over processes they are gathered, so all processes must ask.
        """
        now, start = (live or self.current).whole(), self.start.whole()
        return self.gated.change(now, start, self.history) if self.gated else now.since(start)

    def block_change(self) -> Product:
        """What the current block alone has to do with it; with gates, earlier blocks change as well."""
        now, start = self.current.whole(), self.start.whole()
        return self.gated.block(now, start) if self.gated else now.since(start)

    def _named(self, factors: Factors, name: str) -> Any:
        if name not in ("A", "B"):
            raise UnknownName(f'a LoRA block has factors "A" and "B", not {name!r}')
        return getattr(factors, name)


@dataclass(frozen=True, eq=False)
class Anchor:
    """What a constraint may see of a task: the sites, the model, and what it remembered of earlier tasks.

    losses: given a count, the losses of so many single training examples of the task, one at a time, dropout off, with graph.
    adapter_name: the adapter whose factors the sites hold, in `model`.
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
        """The sites of one adapter of a PEFT model, their present values as anchor.

        model: a PeftModel, or what wraps one (DDP, torch.compile, a LightningModule), after all wrapping;
        adapter_name: the adapter that trains, by default the one that is active; cores, wides: adapted layer -> directions, by the
        layer's path in the base model; history: an adapter whose rows are frozen earlier blocks; gates: of history and block.
        Raises LookupError when the model has no such adapter or the cores name other layers, ValueError when the adapter is not
        active, a core has another width or a 4-bit base passes no gradient, TypeError for layers whose update is no product s B A
        (DoRA and other variants) and for models whose factors lie in flat buffers (FSDP1, DeepSpeed).
        """
        refuse_flat_parameters(model)
        if any(parameter.requires_grad for parameter in model.parameters()):
            keep_unpacked(model)
        found = lora_layers(model)
        adapter_name = adapter_name or _training_adapter(found)
        modules = {name: module for name, module in found.items() if adapter_name in module.lora_A}
        if not modules:
            raise UnknownName(f"the model has no LoRA block called {adapter_name!r}; it has: {', '.join(_known(found)) or 'none'}")
        for kind, given in (("cores", cores), ("wide bases", wides)):
            if given and set(given) != set(modules):
                raise UnknownName(other_layers(kind, set(given), set(modules)))
        layers = []
        gated = Gated(gates, gates.multipliers().detach().clone()) if gates else None
        for name, module in modules.items():
            core, wide = cores.get(name), wides.get(name)
            for adapter in (adapter_name, history) if history and history in module.lora_A else (adapter_name,):
                refuse_other_kinds(name, module, adapter)
            current = block_factors(module, adapter_name)
            frozen = block_factors(module, history) if history and history in module.lora_A else None
            for directions in (core, wide):
                if directions is not None and directions.d != current.A.shape[1]:
                    raise InvalidValue(
                        f"the core of {name} has width {directions.d}, but its A reads {current.A.shape[1]} inputs; "
                        "these cores belong to another model"
                    )
            with true_precision({current.A.device.type}):
                whole = WholeLayer.of(name, module, adapter_name, core=core, gated=gates is not None)
            layers.append(AdaptedLayer(name, current, current.copy(), frozen, core, wide, gated, whole))
        return cls(tuple(layers), model, past, losses, adapter_name)

    def changed(self) -> list[str]:
        """What of the layers is not as it was at the anchor, beside the factors that are protected; a sentence each."""
        if self.model is None or self.adapter_name is None:
            return []
        layers = lora_layers(self.model)
        devices = {layer.current.A.device.type for layer in self.layers}
        with true_precision(devices):
            said = [layer.whole.changed(layers.get(layer.name)) for layer in self.layers if layer.whole is not None]
        return [sentence for sentence in said if sentence]

    def trains_beside(self) -> dict[str, nn.Parameter]:
        """Every parameter of the model that trains and is none of the protected factors, by name."""
        if self.model is None or self.adapter_name is None:
            return {}
        factors = {id(layer.factor(name)) for layer in self.layers for name in ("A", "B")}
        return {n.replace(COMPILED, ""): p for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in factors}

    def replaced(self) -> str | None:
        """The layer whose factors in the model are no longer those of its site, if there is one."""
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
        """What the model computes with now, by layer: other factors than the sites' where a loop has replaced them."""
        if self.model is None or self.adapter_name is None:
            return {}
        layers = lora_layers(self.model)
        found = {layer.name: self._in_model(layers.get(layer.name)) for layer in self.layers}
        return {path: factors for path, factors in found.items() if factors is not None}

    def _in_model(self, module: LoraLayer | None) -> Factors | None:
        if module is None or self.adapter_name is None or self.adapter_name not in module.lora_A:
            return None
        return Factors(
            module.lora_A[self.adapter_name].weight,
            module.lora_B[self.adapter_name].weight,
            float(module.scaling[self.adapter_name]),
        )


def _training_adapter(layers: Mapping[str, LoraLayer]) -> str:
    """The active adapter that trains, or the only one that is active.  Raises LookupError where several could be meant."""
    active = active_adapters(layers)
    training = [name for name in active if any(_trains(module, name) for module in layers.values())]
    meant = training or active
    if not active:
        raise UnknownName(f"the model has no active LoRA adapter; it has: {', '.join(_known(layers)) or 'none'}")
    if len(meant) != 1:
        named = ", ".join(map(repr, meant)) or "none"
        raise UnknownName(
            f"give the adapter that is to be protected: {len(meant)} adapters {'train' if training else 'are active'} ({named})"
        )
    return meant[0]


def _trains(module: LoraLayer, adapter: str) -> bool:
    halves = [half[adapter].weight for half in (module.lora_A, module.lora_B) if adapter in half]
    return any(weight.requires_grad for weight in halves)


def _known(layers: Mapping[str, LoraLayer]) -> list[str]:
    return sorted({name for module in layers.values() for name in module.lora_A})


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Adapted layers by their path in the base model, in the model's order, whatever wraps the PEFT model.

    Raises LookupError where several PEFT models could be meant.
    """
    adapted = [module for module in model.modules() if isinstance(module, PeftModel)]
    if len(adapted) > 1:
        raise UnknownName(f"{type(model).__name__} holds {len(adapted)} PEFT models; give the one that trains")
    base = adapted[0].base_model.model if adapted else model
    return {name.replace(COMPILED, ""): module for name, module in base.named_modules() if isinstance(module, LoraLayer)}


def block_factors(module: LoraLayer, adapter_name: str) -> Factors:
    return Factors(module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight, float(module.scaling[adapter_name]))


def other_layers(kind: str, given: set[str], adapted: set[str]) -> str:
    missing, unknown = sorted(adapted - given), sorted(given - adapted)
    parts = [f"no {kind} for {missing[0]} and {len(missing) - 1} others"] if missing else []
    parts += [f"{kind} for {unknown[0]} and {len(unknown) - 1} others, which are not adapted"] if unknown else []
    return f"{kind} and adapter do not fit: " + "; ".join(parts)
