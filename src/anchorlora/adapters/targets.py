"""Which layers of a model a LoRA block adapts, and whether a saved block fits them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from anchorlora.geometry import Factors


def target_layers(base: nn.Module, targets: tuple[str, ...] | str) -> dict[str, nn.Linear]:
    """The layers that `targets` names in a model without adapters, by path.

    Raises LookupError when there is none, and TypeError for one that is no nn.Linear.
    """
    matched = {name: module for name, module in base.named_modules() if _is_target(name, module, targets)}
    linear = sorted({n.rsplit(".", 1)[-1] for n, m in base.named_modules() if isinstance(m, nn.Linear)})
    kind = type(base).__name__
    if not matched:
        asked = targets if isinstance(targets, str) else ", ".join(targets)
        raise LookupError(f"{kind} has no module called {asked}; its linear layers are: {', '.join(linear) or 'none'}")
    for name, module in matched.items():
        if not isinstance(module, nn.Linear):
            raise TypeError(
                f"{name} of {kind} is a {type(module).__name__}, and only nn.Linear can be adapted and protected here; "
                f"choose other targets (its linear layers: {', '.join(linear) or 'none'}) or another model"
            )
    return matched


def _is_target(name: str, module: nn.Module, targets: tuple[str, ...] | str) -> bool:
    if targets == "all-linear":
        return isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] != "lm_head"
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith("." + target) for target in targets)


def refuse_misfit(base: nn.Module, saved: Mapping[str, Factors], *, where: str) -> None:
    """Raises ValueError where saved factors are of another model."""
    linear = {name: module for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    for layer, f in saved.items():
        if layer not in linear:
            raise ValueError(f"{where} adapts {layer}, which is no nn.Linear of the model; the adapter belongs to another model")
        shape, found = (f.B.shape[0], f.A.shape[1]), (linear[layer].out_features, linear[layer].in_features)
        if found != shape:
            raise ValueError(f"{where} adapts {layer} as {shape}, but it is {found}; the adapter belongs to another model")
