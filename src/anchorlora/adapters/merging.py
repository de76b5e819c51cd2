"""A saved adapter merged into the weights of a loaded model, one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from anchorlora.adapters.sites import NOTHING
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

    before, cores: an earlier adapter and the directions protected since, both by layer, or neither. Raises TypeError for layers
    that cannot take an update, ValueError for a weight that two layers share or that does not fit in `dtype`.
    """
    layers = {name: _linear(model, name) for name in factors}
    shared = _shared(model)
    found = {}
    for name, f in factors.items():
        if id(layers[name].weight) in shared:
            others = ", ".join(sorted(shared[id(layers[name].weight)] - {f"{name}.weight"}))
            raise ValueError(
                f"{name} shares its weight with {others}, which a merge would change too; export with --form cat or svd"
            )
        then = before[name].product() if before else None
        found[name] = merge_(layers[name].weight.data, f.product(), dtype, before=then, core=cores.get(name))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{name} does not fit in {str(dtype).removeprefix('torch.')}; choose another --dtype")
    return found


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module: Any = model.get_submodule(name)
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        kind = type(module).__name__
        raise TypeError(f"{name} is a {kind}, and only nn.Linear with floating-point weights can be merged into")
    return module


def _shared(model: nn.Module) -> dict[int, set[str]]:
    """The names of every parameter that has more than one, by identity."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {key: mine for key, mine in names.items() if len(mine) > 1}
