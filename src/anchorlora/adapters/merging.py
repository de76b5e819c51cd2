"""Merge a saved adapter into the weights of a loaded model, one layer at a time, or the newest block into the earlier ones.

Also reads the effective weights, base and adapter together, for PEFT methods whose change is a matrix: OSF, LoRA and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils.modeling import find_tied_parameters
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.merge_utils import ties
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anchorlora.adapters.layers import NOTHING
from anchorlora.adapters.targets import Adaptable
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidType, InvalidValue, UnknownName
from anchorlora.geometry import Factors, Rounding, Subspace, merge_, truncated

WHOLE = "_reconstruct_weight"  # of OSF before PEFT 0.21, which has no get_delta_weight


def merge(
    model: nn.Module,
    factors: Mapping[str, Factors],
    dtype: torch.dtype,
    *,
    before: Mapping[str, Factors] = NOTHING,
    cores: Mapping[str, Subspace] = NOTHING,
) -> dict[str, Rounding]:
    """Add every layer's s B A to its weight and round ALL floating-point parameters to `dtype`, in place. Parameters keep their own
    storage type.
    """
    layers, merged = mergeable(model, factors), {}
    for name, f in factors.items():
        then = before[name].product() if before else None
        weight = layers[name].weight.data  # a view of GPT-2's (d_in, d_out), which is written through
        weight = weight.T if isinstance(layers[name], Conv1D) else weight
        merged[name] = merge_(weight, f.product(), dtype, before=then, core=cores.get(name))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        if not bool(torch.isfinite(parameter).all()):
            raise InvalidValue(f"{name} does not fit in {str(dtype).removeprefix('torch.')}; choose another --dtype")
    return merged


def merged_factors(stacked: Factors, newest: int, *, by: str, share: float, draw: torch.Generator | None = None) -> Factors:
    """Return stacked factors with their newest rows merged into the earlier ones, at the same rank and scale."""
    old = stacked.rank - newest
    if by == "snapshot":
        return Factors(stacked.A, torch.cat([stacked.B[:, :old], share * stacked.B[:, old:]], dim=1), stacked.scale)
    A, B = (in_float64(factor.detach().cpu()) for factor in (stacked.A, stacked.B))
    before, change = B[:, :old] @ A[:old], B[:, old:] @ A[old:]  # both at the scale, which neither way of merging sees
    if by == "ties":
        merged = ties([before, change], torch.ones(2, dtype=A.dtype, device=A.device), share)
    else:
        own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=draw, device="cpu")))
        merged = before + change * torch.bernoulli(torch.full_like(change, share), generator=own) / share
    return truncated(Factors(merged, torch.eye(len(merged), dtype=A.dtype, device=A.device), stacked.scale), stacked.rank)


def mergeable(model: nn.Module, names: Iterable[str]) -> dict[str, Adaptable]:
    """Return the layers that an update can be merged into."""
    modules, tied, out = dict(model.named_modules()), find_tied_parameters(model), {}
    for name in names:
        if (module := modules.get(name)) is None:
            raise InvalidValue(f"the model has no layer {name}; the adapter belongs to another model")
        if not isinstance(module, Adaptable) or not module.weight.is_floating_point():
            kind = type(module).__name__
            raise InvalidType(f"{name} is a {kind}, and only linear layers with floating-point weights can be merged into")
        if shared := next((names for names in tied if f"{name}.weight" in names), None):
            others = ", ".join(sorted({*shared} - {f"{name}.weight"}))
            raise InvalidValue(
                f"{name} shares its weight with {others}, which a merge would change too; export with --form cat or svd"
            )
        out[name] = module
    return out


def realized_weights(model: nn.Module, adapter_name: str = "default") -> dict[str, Callable[[], Tensor]]:
    """Return functions that give the effective weights of adapted layers, W + dW.

    Args:
        model: Adapted model of any PEFT method whose change is a matrix.
        adapter_name: Name of the adapter.

    Returns:
        Layer path in `model` -> function that returns W + dW (d_out, d_in) as the layer multiplies with it now, in float32 or
        better.

    Raises:
        UnknownName: No adapter of this name has a change that is a matrix.

    Example:
        >>> from anchorlora.adapters import realized_weights
        >>> weights = realized_weights(tiny())
        >>> weights["base_model.model.model.layers.0.self_attn.v_proj"]().shape
        torch.Size([16, 32])
    """
    layers: dict[str, Callable[[], Tensor]] = {
        name: partial(_realize, layer, adapter_name)
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
        and (hasattr(layer, "get_delta_weight") or hasattr(layer, WHOLE))
        and any(adapter_name in getattr(layer, attribute, {}) for attribute in layer.adapter_layer_names)
    }
    if not layers:
        raise UnknownName(f"the model has no adapter {adapter_name!r} whose change is a matrix")
    return layers


def _realize(layer: Any, adapter_name: str) -> Tensor:
    if hasattr(layer, WHOLE):
        whole: Tensor = getattr(layer, WHOLE)(adapter_name)
        return whole
    delta = layer.get_delta_weight(adapter_name)
    weight = layer.get_base_layer().weight.to(delta) + delta
    return weight.T if getattr(layer, "fan_in_fan_out", False) else weight
