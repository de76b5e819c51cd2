"""Target layers of an adapter, and the checks that a saved adapter fits them.

The base model may hold its weights in 4 or 8 bits by bitsandbytes: they stay as they are and pass gradients on.

On processors with AVX512-BF16, bitsandbytes packs a 4-bit weight into another layout at the first forward in eval mode. A packed
weight has no backward and is not unpacked for training: gradients through it vanish silently, and its scales are rounded to
bfloat16. A base model that adapters are trained on must therefore never be packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from anchorlora.errors import InvalidType, InvalidValue, UnknownName
from anchorlora.geometry import Factors


def target_layers(base: nn.Module, targets: tuple[str, ...] | str) -> dict[str, nn.Linear]:
    """Return the layers that `targets` names in a model without adapters.

    Args:
        base: A model without adapters.
        targets: Suffixes of module paths, "all-linear" (all but lm_head), or a regular expression for the whole path.

    Returns:
        Layer path -> layer.

    Raises:
        UnknownName: No module matches; the message lists the model's linear layers.
        InvalidType: A match is not nn.Linear.

    Example:
        >>> from anchorlora.adapters import target_layers
        >>> base = tiny().unload()
        >>> list(target_layers(base, ("q_proj",)))
        ['model.layers.0.self_attn.q_proj', 'model.layers.1.self_attn.q_proj']
        >>> len(target_layers(base, "all-linear"))
        14
    """
    matched = {name: module for name, module in base.named_modules() if _is_target(name, module, targets)}
    linear = sorted({n.rsplit(".", 1)[-1] for n, m in base.named_modules() if isinstance(m, nn.Linear)})
    kind = type(base).__name__
    if not matched:
        asked = targets if isinstance(targets, str) else ", ".join(targets)
        raise UnknownName(f"{kind} has no module called {asked}; its linear layers are: {', '.join(linear) or 'none'}")
    for name, module in matched.items():
        if not isinstance(module, nn.Linear):
            raise InvalidType(
                f"{name} of {kind} is a {type(module).__name__}, and only nn.Linear can be adapted and protected here; "
                f"choose other targets (its linear layers: {', '.join(linear) or 'none'}) or another model"
            )
    return matched


def _is_target(name: str, module: nn.Module, targets: tuple[str, ...] | str) -> bool:
    if targets == "all-linear":
        return isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] != "lm_head"
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return named(name, targets)


def named(layer: str, names: Iterable[str]) -> bool:
    """Return True if one of the names is a layer's path or the end of it, as PEFT reads a list.

    Args:
        layer: Path of a layer.
        names: Module names or paths.

    Example:
        >>> from anchorlora.adapters.targets import named
        >>> named("model.layers.0.self_attn.q_proj", ["self_attn.q_proj"]), named("model.my_q_proj", ["q_proj"])
        (True, False)
    """
    return any(layer == name or layer.endswith("." + name) for name in names)


def refuse_misfit(base: nn.Module, saved: Mapping[str, Factors], *, where: str) -> None:
    """Raise unless saved factors fit the layers of a model.

    Args:
        base: A model without adapters.
        saved: Layer path -> factors.
        where: Source of the factors, for the error message.

    Raises:
        InvalidValue: The model has no such layer, or one of another size.
    """
    shapes = {name: _shape(module) for name, module in base.named_modules() if getattr(module, "weight", None) is not None}
    for layer, f in saved.items():
        shape = f.B.shape[0], f.A.shape[1]
        if layer not in shapes:
            raise InvalidValue(f"{where} adapts {layer}, which the model does not have; the adapter belongs to another model")
        if shapes[layer] not in (shape, shape[::-1]):  # GPT-2's layers hold the transpose
            raise InvalidValue(
                f"{where} adapts {layer} as {shape}, but it is {shapes[layer]}; the adapter belongs to another model"
            )


def _shape(module: Any) -> tuple[int, ...]:
    """(d_out, d_in) of a linear layer, whose quantized weight may be packed into another shape."""
    return (module.out_features, module.in_features) if isinstance(module, nn.Linear) else tuple(module.weight.shape)


PACKS, PACKED = "support_avx512bf16_for_cpu", "packing_format_for_cpu"


def keep_unpacked(base: nn.Module) -> None:
    """Keep the 4-bit weights of a model in the layout that passes gradients on, in eval mode too.

    Args:
        base: A model, quantized or not.

    Raises:
        InvalidValue: A weight is packed already; the model must be loaded again.
    """
    for name, module in base.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, PACKED, False):
            raise InvalidValue(
                f"{name} has run in eval mode before, and bitsandbytes has packed its 4-bit weight for inference: no gradient "
                "passes through it; load the model again, and add the adapters first"
            )
        if state is not None and hasattr(module, PACKS):
            setattr(module, PACKS, False)
