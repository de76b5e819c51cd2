"""Weights as they act now, base and adapter together, for PEFT methods whose change is a matrix: OSF, LoRA and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn


def realised_weights(model: nn.Module, block: str = "default") -> dict[str, Callable[[], Tensor]]:
    """Adapted layer -> a function that returns W + dW (d_out, d_in) in float32 or better, as the layer multiplies with it now.

    By the layer's path in the model as given. Raises LookupError when no adapter of that name has a change that is a matrix.
    """
    layers: dict[str, Callable[[], Tensor]] = {
        name: partial(_realised, layer, block)
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer) and hasattr(layer, "get_delta_weight") and block in _blocks(layer)
    }
    if not layers:
        raise LookupError(f"the model has no adapter {block!r} whose change is a matrix")
    return layers


def _blocks(layer: Any) -> set[str]:
    return {name for attribute in layer.adapter_layer_names for name in getattr(layer, attribute, {})}


def _realised(layer: Any, block: str) -> Tensor:
    delta = layer.get_delta_weight(block)
    return layer.get_base_layer().weight.to(delta) + delta
