"""Full weights, alone or beside LoRA: linear layers and embeddings whose weight itself trains.

    W  (d_out, d_in)  weight      V  (d_in, k)  core      dW = W - W_0 = I dW      I  the identity, never stored

With A = W and B = I, a full weight is the linear case of s B A: nothing is bilinear, so dW V = 0 alone keeps the layer's answer on
the core, and there is no second factor to freeze. An embedding is the same map with one-hot inputs: V are tokens, and their rows
stay bitwise what they were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from anchorlora.adapters.kinds import kind_of
from anchorlora.adapters.layers import COMPILED, AdaptedLayer, as_subspace, base_model_in, lora_layers
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidType, InvalidValue, UnknownName
from anchorlora.geometry import Factors, LayerCore, Product, Subspace
from anchorlora.geometry.subspace import TokenRows

EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Weight(Factors):
    """A full weight (d_out, d_in) as factors: A is the weight, and B the identity, of which an empty tensor is stored."""

    B: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"), init=False, repr=False)
    scale: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        """Take any matrix."""

    @property
    def W(self) -> Tensor:  # noqa: N802  # its letter in the equations
        """The weight."""
        return self.A

    def copy(self) -> Weight:
        """Return a detached copy."""
        return type(self)(self.A.detach().clone())

    def whole(self) -> Weight:
        """Return the weight itself: it is never split."""
        return self

    def product(self) -> Product:
        """Return I W, or W I where that identity is the smaller one."""
        W = in_float64(self.A.detach())
        identity = torch.eye(min(W.shape), dtype=W.dtype, device=W.device)
        return Product(W, identity) if W.shape[0] > W.shape[1] else Product(identity, W)

    def since(self, anchor: Factors) -> Product:
        """Return the change I (W - W_0) in float64."""
        return type(self)(in_float64(self.A.detach()) - in_float64(anchor.A.detach())).product()

    def storage_floor(self, *, k: int, d: int, unit: float) -> float:
        """Return the norm on k of d directions that rounding explains: unit |W| sqrt(k/d)."""
        return unit * float(in_float64(self.A.detach()).norm()) * math.sqrt(k / d)


class Rows(Weight):
    """The weight (tokens, d) of an embedding, which maps a one-hot token: the transpose of a linear layer's."""

    def product(self) -> Product:
        """Return I W^T, (d, tokens)."""
        W = in_float64(self.A.detach())
        return Product(torch.eye(W.shape[1], dtype=W.dtype, device=W.device), W.T)

    def storage_floor(self, *, k: int, d: int, unit: float) -> float:
        """Return 0: protected rows are put back bitwise."""
        return 0.0


@dataclass(frozen=True, eq=False)
class WeightLayer(AdaptedLayer):
    """One linear layer whose weight trains; its only factor is "W"."""

    names: ClassVar[tuple[str, ...]] = ("W",)
    has: ClassVar[str] = 'a full weight is one factor, "W"'


class EmbeddingLayer(WeightLayer):
    """One embedding whose weight trains; its rows are given transposed, as those of a linear layer (d, tokens)."""

    def rows(self, name: str) -> Tensor:
        """Return the live weight, transposed; writing to it moves the parameter."""
        return super().rows(name).T

    def gradient_rows(self, name: str) -> Tensor | None:
        """Return its gradient, transposed."""
        gradient = super().gradient_rows(name)
        return None if gradient is None else gradient.T

    def start_rows(self, name: str) -> Tensor:
        """Return the weight at the start, transposed."""
        return super().start_rows(name).T


def weight_layers(
    model: nn.Module, cores: Mapping[str, Subspace | LayerCore | Tensor]
) -> tuple[list[WeightLayer], frozenset[int], tuple[str, ...]]:
    """Return the layers that cores are given for; of embeddings that train by rows, their identities and what is tied to them."""
    modules, adapted = modules_of(model), lora_layers(model)
    if unknown := [name for name in cores if name not in modules and name not in adapted]:
        raise UnknownName(f"the model has no layer {unknown[0]}; a core's name is the layer's path in the model")
    layers, held, tied = list[WeightLayer](), set[int](), list[str]()
    for name in (*modules, *adapted):  # in the model's order
        if name not in cores:
            continue
        rows = getattr(modules.get(name), "token_adapter", None)
        if isinstance(rows, TrainableTokensLayer):
            held |= {id(_trained_rows(name, rows, cores[name]))}
            tied += [other for other, module in modules.items() if _is_tied(module, rows)]
            continue
        weight = _trained_weight(name, modules, adapted)
        if isinstance(modules[name], nn.Embedding):
            core = TokenRows(_tokens(cores[name], at=name), d=len(weight))
            layers.append(EmbeddingLayer(name, Rows(weight), Rows(weight).copy(), core=core))
            continue
        directions = as_subspace(cores[name], at=name)
        if directions is None or directions.d != weight.shape[1]:
            width = "no" if directions is None else directions.d
            raise InvalidValue(f"the core of {name} has width {width}, but its weight reads {weight.shape[1]} inputs")
        layers.append(WeightLayer(name, Weight(weight), Weight(weight).copy(), core=directions))
    _refuse_shared(model, layers)
    return layers, frozenset(held), tuple(tied)


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules without an adapter by their path in the base model, whatever wraps it; of those that PEFT copied, the copies."""
    inner: Any = model
    while isinstance(inner, nn.parallel.DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner._orig_mod
    named = base_model_in(inner).named_modules()
    return {name.replace(COMPILED, ""): _trained(module) for name, module in named if kind_of(module) is None}


def _trained(module: nn.Module) -> nn.Module:
    """The copy of a module that PEFT trains and saves in its place (`modules_to_save`), or the module."""
    if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
        return module.modules_to_save[module.active_adapters[0]]
    return module


def trains_whole(model: nn.Module) -> set[str]:
    """Return the paths of the modules beside the adapted layers whose weight, or some rows of it, trains."""
    modules = {name: module for name, module in modules_of(model).items() if not isinstance(module, BaseTunerLayer)}
    parts = {name: module.parameters(recurse=hasattr(module, "token_adapter")) for name, module in modules.items()}
    return {name for name, parameters in parts.items() if any(p.requires_grad for p in parameters)}


def _is_tied(module: nn.Module, rows: TrainableTokensLayer) -> bool:
    """True for a module that computes with the same trained rows, such as a head that is tied to the embedding."""
    other = getattr(module, "token_adapter", None)
    return other is not rows and getattr(other, "tied_adapter", None) is rows


def _tokens(given: Any, *, at: str) -> Tensor:
    if not isinstance(given, Tensor) or given.is_floating_point():
        raise InvalidType(f"{at} is an embedding: give the numbers of its tokens whose rows must stay, not a subspace")
    return given


def _trained_rows(name: str, rows: TrainableTokensLayer, kept: Any) -> nn.Parameter:
    """The rows of an embedding that PEFT trains: by construction, no other one moves."""
    (adapter,) = rows.active_adapters
    core = TokenRows(_tokens(kept, at=name), d=rows.base_layer.weight.shape[0])
    if both := sorted({int(token) for token in rows.token_indices[adapter]} & set(core.tokens.tolist())):
        raise InvalidValue(f"the row of token {both[0]} at {name} is to train and to stay; take it out of trainable_token_indices")
    trained: nn.Parameter = rows.trainable_tokens_delta[adapter]
    return trained


def _trained_weight(name: str, modules: Mapping[str, nn.Module], adapted: Mapping[str, Any]) -> nn.Parameter:
    if name in adapted:
        raise InvalidType(f"{name} has an adapter, and its own weight does not train; use Anchor.of(model) for it")
    weight = modules[name]._parameters.get("weight")
    if not isinstance(modules[name], nn.Linear | nn.Embedding) or weight is None or weight.ndim != 2:
        kind = type(modules[name]).__name__
        raise InvalidType(f"{name} is a {kind}, not a linear layer or an embedding with a weight of its own; give no core for it")
    if weight.dtype not in EXACT:
        raise InvalidType(
            f"exact protection needs a float32 weight, but that of {name} is {weight.dtype}, and a master copy that an optimizer "
            "keeps is not what the model computes with; load the model in float32 and train under autocast"
        )
    if not weight.requires_grad:
        raise InvalidValue(f"the weight of {name} does not train; call requires_grad_(True) on it, or give no core for it")
    return weight


def _refuse_shared(model: nn.Module, layers: list[WeightLayer]) -> None:
    """Refuse a weight that another module computes with too, such as a head that is tied to the embedding."""
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    if shared := next((layer.name for layer in layers if uses[id(layer.factor("W"))] > 1), None):
        raise InvalidValue(f"the weight of {shared} is shared with another layer, whose answers would move; give no core for it")
