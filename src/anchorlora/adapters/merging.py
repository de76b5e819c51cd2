"""A saved adapter merged into the weights of a loaded model, one layer at a time.

Weights as they act now, base and adapter together, for PEFT methods whose change is a matrix: OSF, LoRA and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from anchorlora.adapters.layers import NOTHING
from anchorlora.errors import InvalidType, InvalidValue, UnknownName
from anchorlora.geometry import Factors, Rounding, Subspace, merge_


def merge(
    model: nn.Module,
    factors: Mapping[str, Factors],
    dtype: torch.dtype,
    *,
    before: Mapping[str, Factors] = NOTHING,
    cores: Mapping[str, Subspace] = NOTHING,
) -> dict[str, Rounding]:
    """Add every layer's s B A to its weight and round ALL floating parameters to `dtype`, in place; they stay in their own type.

    before, cores: an earlier adapter and the directions protected since, both by layer, or neither. Raises as `mergeable` does,
    and ValueError for a parameter that does not fit in `dtype`.
    """
    layers, found = mergeable(model, factors), {}
    for name, f in factors.items():
        then = before[name].product() if before else None
        found[name] = merge_(layers[name].weight.data, f.product(), dtype, before=then, core=cores.get(name))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        if not bool(torch.isfinite(parameter).all()):
            raise InvalidValue(f"{name} does not fit in {str(dtype).removeprefix('torch.')}; choose another --dtype")
    return found


def mergeable(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Linear]:
    """The layers of these names.  Raises ValueError or TypeError for one that is not there or cannot take an update of its own."""
    modules, shared, out = dict(model.named_modules()), _shared(model), {}
    for name in names:
        module = modules.get(name)
        if module is None:
            raise InvalidValue(f"the model has no layer {name}; the adapter belongs to another model")
        if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
            kind = type(module).__name__
            raise InvalidType(f"{name} is a {kind}, and only nn.Linear with floating-point weights can be merged into")
        if id(module.weight) in shared:
            others = ", ".join(sorted(shared[id(module.weight)] - {f"{name}.weight"}))
            raise InvalidValue(
                f"{name} shares its weight with {others}, which a merge would change too; export with --form cat or svd"
            )
        out[name] = module
    return out


def _shared(model: nn.Module) -> dict[int, set[str]]:
    """The names of every parameter that has more than one, by identity."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {key: mine for key, mine in names.items() if len(mine) > 1}


def realized_weights(model: nn.Module, block: str = "default") -> dict[str, Callable[[], Tensor]]:
    """Adapted layer -> a function that returns W + dW (d_out, d_in) in float32 or better, as the layer multiplies with it now.

    By the layer's path in the model as given. Raises LookupError when no adapter of that name has a change that is a matrix.
    """
    layers: dict[str, Callable[[], Tensor]] = {
        name: partial(_realized, layer, block)
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer) and hasattr(layer, "get_delta_weight") and block in _blocks(layer)
    }
    if not layers:
        raise UnknownName(f"the model has no adapter {block!r} whose change is a matrix")
    return layers


def _blocks(layer: Any) -> set[str]:
    return {name for attribute in layer.adapter_layer_names for name in getattr(layer, attribute, {})}


def _realized(layer: Any, block: str) -> Tensor:
    delta = layer.get_delta_weight(block)
    return layer.get_base_layer().weight.to(delta) + delta
