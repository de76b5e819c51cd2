"""Kinds of layers that add s B A x to a frozen layer's output: PEFT's, and those of other libraries.

To protect layers of another library, append a `LayerKind` to `LAYER_KINDS` (docs/extend.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from anchorlora.adapters.sharding import is_sharded
from anchorlora.errors import InvalidType
from anchorlora.geometry import Factors


class LayerKind(Protocol):
    """A class of adapted layers: which modules belong to it, and where their factors are.

    A layer computes base(x) + s B A x for each of its active adapters, with A (r, d_in) and B (d_out, r), and reads x (.., d_in)
    as its first argument. For PEFT's own layers, the anchor also checks that the layer computes this and nothing else; for other
    kinds, that is the promise of the kind.

    Example:
        >>> from anchorlora.adapters.kinds import LAYER_KINDS, kind_of
        >>> layer = tiny().base_model.model.model.layers[0].self_attn.q_proj
        >>> kind = kind_of(layer)
        >>> kind.adapters(layer), kind.factors(layer, "default").scale
        (('default',), 2.0)
    """

    def owns(self, module: nn.Module) -> bool:
        """Return True if a module of the model is a layer of this kind.

        Args:
            module: Any module of a model.
        """

    def adapters(self, module: Any) -> Sequence[str]:
        """Return the names of the adapters at a layer.

        Args:
            module: A layer of this kind.
        """

    def active(self, module: Any) -> Sequence[str]:
        """Return the names of the adapters that the layer computes with now.

        Args:
            module: A layer of this kind.
        """

    def factors(self, module: Any, adapter_name: str) -> Factors:
        """Return the live factors of one adapter: the parameters that the optimizer changes, no copies.

        Args:
            module: A layer of this kind.
            adapter_name: One of `adapters(module)`.
        """


class PeftLora:
    """LoRA layers of PEFT."""

    def owns(self, module: nn.Module) -> bool:
        """Return True for PEFT's LoRA layers."""
        return isinstance(module, LoraLayer)

    def adapters(self, module: LoraLayer) -> Sequence[str]:
        """Return the names of the adapters with factors of a matrix."""
        return tuple(module.lora_A)

    def active(self, module: LoraLayer) -> Sequence[str]:
        """Return the names of the active adapters; none while adapters are disabled."""
        if module.disable_adapters:
            return ()
        return tuple(name for name in module.active_adapters if name in module.lora_A or name in module.lora_embedding_A)

    def factors(self, module: LoraLayer, adapter_name: str) -> Factors:
        """Return the live factors of one adapter; AdaLoRA's are bare parameters, with a third between them."""
        if isinstance(module.lora_A, nn.ParameterDict):
            raise InvalidType(f"PEFT's {type(module).__name__} is no product s B A; train a plain LoRA adapter instead")
        return Factors(module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight, float(module.scaling[adapter_name]))


LAYER_KINDS: list[LayerKind] = [PeftLora()]


def kind_of(module: nn.Module) -> LayerKind | None:
    """Return the first kind in `LAYER_KINDS` that owns a module, or None."""
    return next((kind for kind in LAYER_KINDS if kind.owns(module)), None)


def adapters_at(module: nn.Module) -> Sequence[str]:
    """Return the names of the adapters at a layer; none where no kind owns it."""
    kind = kind_of(module)
    return kind.adapters(module) if kind else ()


def active_at(module: nn.Module) -> Sequence[str]:
    """Return the names of the active adapters at a layer; none where no kind owns it."""
    kind = kind_of(module)
    return kind.active(module) if kind else ()


def block_factors(module: nn.Module, adapter_name: str) -> Factors:
    """Return the live factors of one adapter at one layer."""
    kind = kind_of(module)
    assert kind is not None
    return kind.factors(module, adapter_name)


def width_at(module: nn.Module) -> int | None:
    """Return d_in of a layer, by its first adapter; None where it has none."""
    names = adapters_at(module)
    return block_factors(module, names[0]).A.shape[1] if names else None


@contextmanager
def without_empty(model: nn.Module) -> Iterator[None]:
    """Leave out, in the block, PEFT's adapters whose B is 0: the same outputs and gradients of activations, in less time."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer) and _adds_products_alone(layer)]
    moves = [torch.stack([layer.lora_B[name].weight.detach().any() for name in active_at(layer)]).any() for layer in layers]
    moving = torch.stack([move.to(moves[0].device) for move in moves]).tolist() if moves else []  # a device is waited for once
    empty = [layer for layer, moves in zip(layers, moving, strict=True) if not moves]
    for layer in empty:
        layer._disable_adapters = True  # `enable_adapters` would also change what trains
    try:
        yield
    finally:
        for layer in empty:
            layer._disable_adapters = False


def _adds_products_alone(layer: LoraLayer) -> bool:
    """Return whether the layer adds B A x and nothing else, of factors that this process holds whole and can read."""
    names = active_at(layer)
    if not names or layer.merged or any(name not in layer.lora_B or name in layer.lora_variant for name in names):
        return False
    factors = [layer.lora_B[name] for name in names]
    return all(B.bias is None and B.weight.device.type != "meta" and not is_sharded(B.weight) for B in factors)


def hold(module: LoraLayer, adapter_name: str) -> Callable[[], None]:
    """Let code that switches adapters switch only one of a layer's, and return the function that ends this.

    The other active adapters stay active as part of the base, also while that one is off, and what does not train now does not
    train afterwards; PEFT would train all that it activates.
    """
    others = [name for name in active_at(module) if name != adapter_name]
    factors = [(name.split(".")[1], p) for name, p in module.named_parameters() if name.startswith("lora_")]  # lora_A.NAME.weight
    frozen = [p for adapter, p in factors if adapter in (*others, adapter_name) and not p.requires_grad]
    switched_off: list[str] = []

    def set_adapter(self: LoraLayer, adapter_names: str | list[str], *args: Any, **kwargs: Any) -> None:
        """Activate an adapter beside the others, and leave frozen what was; a copy of the layer is PEFT's own again."""
        if self is not module:
            type(self).set_adapter(self, adapter_names, *args, **kwargs)
            return
        given = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        type(self).set_adapter(self, [*others, *(name for name in given if name not in others)], *args, **kwargs)
        for parameter in frozen:
            parameter.requires_grad_(False)

    def enable_adapters(self: LoraLayer, enabled: bool) -> None:
        """Switch the protected adapter alone on or off."""
        if not others or self is not module:
            type(self).enable_adapters(self, enabled)
        elif not enabled:
            switched_off[:] = switched_off or self.active_adapters
            self.set_adapter(others)
        else:
            self.set_adapter(switched_off or self.active_adapters)
            switched_off.clear()

    def release() -> None:
        """Give the layer its own methods back."""
        for name in switches:
            vars(module).pop(name, None)

    switches: dict[str, Callable[..., Any]] = {"set_adapter": set_adapter, "enable_adapters": enable_adapters}
    vars(module).update({name: MethodType(switch, module) for name, switch in switches.items()})
    return release


def is_heard(module: Any) -> bool:
    """Return True if the module has a hook."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def add_products(module: LoraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return what a LoRA layer computes: by one function where it only adds products to a frozen weight in float32 on a CPU."""
    lowered = x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
    if args or kwargs or x.device.type != "cpu" or lowered or not _adds_products_alone(module):
        return type(module).forward(module, x, *args, **kwargs)
    names, base = active_at(module), module.base_layer
    inside = [base, *(part[name] for part in (module.lora_A, module.lora_B, module.lora_dropout) for name in names)]
    weights = [base.weight, *(part[name].weight for name in names for part in (module.lora_A, module.lora_B))]
    drops = any(module.lora_dropout[name].training and getattr(module.lora_dropout[name], "p", 0) for name in names)
    plain = all(type(part) in (nn.Linear, nn.Dropout, nn.Identity) and not is_heard(part) for part in inside)
    exact = all(type(w) is nn.Parameter and w.dtype == x.dtype and w.device == x.device for w in weights)
    bare = not base.weight.requires_grad and all(getattr(part, "bias", None) is None for part in inside)
    if drops or not (plain and exact and bare):
        return type(module).forward(module, x)
    return AddedProducts.apply(x, [module.scaling[name] for name in names], *weights)


class AddedProducts(torch.autograd.Function):
    """W x + sum of s B A x over adapters, for a weight W that does not train: every product is added in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Sequence[float], weight: Tensor, *factors: Tensor) -> Tensor:
        """Apply W (d_out, d_in) and the factors A (r, d_in), B (d_out, r), .. to x, (.., d_in)."""
        rows = x.reshape(-1, x.shape[-1])
        out, read = rows @ weight.T, [rows @ A.T for A in factors[::2]]
        for scale, B, within in zip(scales, factors[1::2], read, strict=True):
            out.addmm_(within, B.T, alpha=scale)
        ctx.scales = scales
        ctx.save_for_backward(x, weight, *factors, *read)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the factors that train."""
        x, weight, *others = ctx.saved_tensors
        count, rows, g = len(ctx.scales), x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        factors, read = others[: 2 * count], others[2 * count :]
        of_x = g @ weight if ctx.needs_input_grad[0] else None
        of_factors: list[Tensor | None] = []
        for i, scale in enumerate(ctx.scales):
            A, B = factors[2 * i : 2 * i + 2]
            trains_A, trains_B = ctx.needs_input_grad[3 + 2 * i : 5 + 2 * i]
            back = (g @ B).mul_(scale)
            if of_x is not None:
                of_x.addmm_(back, A)
            of_factors += [back.T @ rows if trains_A else None, (g.T @ read[i]).mul_(scale) if trains_B else None]
        return (None if of_x is None else of_x.view(x.shape), None, None, *of_factors)
