"""A saved adapter merged into the weights of a loaded model, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
            raise ValueError(f"{name} does not fit in {str(dtype).removeprefix('torch.')}; choose another --dtype")
    return found


def mergeable(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Linear]:
    """The layers of these names.  Raises ValueError or TypeError for one that is not there or cannot take an update of its own."""
    modules, shared, out = dict(model.named_modules()), _shared(model), {}
    for name in names:
        module = modules.get(name)
        if module is None:
            raise ValueError(f"the model has no layer {name}; the adapter belongs to another model")
        if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
            kind = type(module).__name__
            raise TypeError(f"{name} is a {kind}, and only nn.Linear with floating-point weights can be merged into")
        if id(module.weight) in shared:
            others = ", ".join(sorted(shared[id(module.weight)] - {f"{name}.weight"}))
            raise ValueError(
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
