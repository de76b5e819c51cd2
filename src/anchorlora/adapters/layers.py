"""Adapted layers of a model: one layer's live factors, their start, the frozen history, and the protected subspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from peft import PeftModel
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anchorlora.adapters.gates import Gated
from anchorlora.adapters.guard import WholeLayer
from anchorlora.adapters.kinds import kind_of
from anchorlora.adapters.sharding import is_sharded, local
from anchorlora.errors import AnchorloraError, InvalidType, InvalidValue, UnknownName
from anchorlora.geometry import Factors, LayerCore, Product, Subspace

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

    names: ClassVar[tuple[str, ...]] = ("A", "B")  # of its factors
    has: ClassVar[str] = 'a LoRA adapter has factors "A" and "B"'

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
        return self._named(self.placed_start(), name)

    def placed_start(self) -> Factors:
        """Return the factors at the start, on the device of the live ones: a trainer may move a model after its anchor is made."""
        device = self.current.A.device
        if self.start.A.device != device:
            vars(self.start).update(A=self.start.A.to(device), B=self.start.B.to(device))
        return self.start

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
        now, start = (live or self.current).whole(), self.placed_start().whole()
        return self.gated.change(now, start, self.history) if self.gated else now.since(start)

    def block_change(self) -> Product:
        """Return the current adapter's part of the change; with gates, earlier adapters change as well."""
        now, start = self.current.whole(), self.placed_start().whole()
        return self.gated.block(now, start) if self.gated else now.since(start)

    def _named(self, factors: Factors, name: str) -> Any:
        if name not in self.names:
            raise UnknownName(f"{self.has}, not {name!r}")
        return getattr(factors, name)


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return the adapted layers by their path in the base model, in the model's order, whatever wraps the PEFT model."""
    base = base_model_in(model)
    return {name.replace(COMPILED, ""): module for name, module in base.named_modules() if kind_of(module) is not None}


def base_model_in(model: nn.Module) -> nn.Module:
    """Return the base model inside a PEFT model, whatever wraps that; a model without PEFT is returned itself."""
    adapted = [module for module in model.modules() if isinstance(module, PeftModel)]
    if len(adapted) > 1:
        raise UnknownName(
            f"{type(model).__name__} holds {len(adapted)} PEFT models; give the one that trains, or load the base model anew if "
            "get_peft_model was called twice"
        )
    return adapted[0].base_model.model if adapted else model


def whole_models_in(model: nn.Module) -> list[nn.Module]:
    """Return a model, the PEFT model that it wraps and the base model in that, each once and the outermost first."""
    inner = [module for module in model.modules() if isinstance(module, PeftModel)]
    return list(dict.fromkeys((model, *inner, base_model_in(model))))


def other_layers(kind: str, given: set[str], adapted: set[str]) -> str:
    """Return an error message for values that were given for other layers than the adapted ones."""
    missing, unknown = sorted(adapted - given), sorted(given - adapted)
    parts = [f"no {kind} for {missing[0]} and {len(missing) - 1} others"] if missing else []
    parts += [f"{kind} for {unknown[0]} and {len(unknown) - 1} others, which are not adapted"] if unknown else []
    return f"{kind} and adapter do not fit: " + "; ".join(parts)


def as_subspace(directions: Subspace | LayerCore | Tensor | None, *, at: str) -> Subspace | None:
    """Return directions as a subspace; None stays None."""
    directions = directions.core if isinstance(directions, LayerCore) else directions
    if directions is None or isinstance(directions, Subspace):
        return directions
    if not isinstance(directions, Tensor):
        raise InvalidType(f"the core of {at} is a {type(directions).__name__}; give a Subspace, or a tensor (d_in, k)")
    try:
        return Subspace(directions.detach())
    except AnchorloraError as error:
        raise type(error)(f"the core of {at}: {error}") from None
