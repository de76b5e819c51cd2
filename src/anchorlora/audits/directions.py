"""What somebody believes must not be touched, by layer: feature cores, singular vectors of the weight, rows of earlier blocks.

right  V  (d_in, k)  directions that the layer reads: dW V should vanish
left   U  (d_out, k)  directions that it writes: U^T dW should vanish; only singular vectors have them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from anchorlora.adapters import NOTHING, Anchor, lora_layers
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Subspace, singular_directions


@dataclass(frozen=True, eq=False)
class Protected:
    """The directions of one layer."""

    right: Subspace
    left: Subspace | None = None

    def fits(self, layer: str, *, d_in: int, d_out: int) -> Protected:
        """Itself, or ValueError when it has another width than the layer."""
        if self.right.d != d_in:
            raise InvalidValue(
                f"the core of {layer} has width {self.right.d}, but the layer reads {d_in} inputs; they are another model's"
            )
        if self.left is not None and self.left.d != d_out:
            raise InvalidValue(f"the left directions of {layer} have width {self.left.d}, but the layer writes {d_out} outputs")
        return self


class Belief(Protocol):
    """Which directions count as protected, on the sites of an adapted model or on plain weights."""

    def on_layers(self, anchor: Anchor) -> dict[str, Protected]:
        """By adapted layer."""
        ...

    def on_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Protected]:
        """By name of the weight (d_out, d_in)."""
        ...


@dataclass(frozen=True, eq=False)
class FeatureCores:
    """Directions of features: the sites' own cores, or these, by layer."""

    cores: Mapping[str, Subspace] = field(default_factory=lambda: NOTHING)

    def on_layers(self, anchor: Anchor) -> dict[str, Protected]:
        found = {layer.name: self.cores.get(layer.name, layer.core) for layer in anchor.layers}
        missing = [path for path, core in found.items() if core is None]
        if missing:
            raise InvalidValue(f"no core to audit at {missing[0]}; pass cores=rows.cores() to Anchor.of, or name other directions")
        return {path: Protected(core) for path, core in found.items() if core is not None}

    def on_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Protected]:
        missing = sorted(set(weights) - set(self.cores))
        if missing:
            raise InvalidValue(f"no core to audit at {missing[0]}; give FeatureCores one for every layer that is watched")
        return {layer: Protected(self.cores[layer]) for layer in weights}


@dataclass(frozen=True)
class WeightDirections:
    """The k leading singular directions of each weight, on both sides, as OSF; k None: half of the smaller side, as in PEFT."""

    k: int | None = None

    def on_layers(self, anchor: Anchor) -> dict[str, Protected]:
        if anchor.model is None:
            raise InvalidValue(
                "singular directions are those of the base weights, and this scope has no model; use Anchor.of(model)"
            )
        layers = lora_layers(anchor.model)
        return {layer.name: self.of(layer.name, layers[layer.name].get_base_layer().weight) for layer in anchor.layers}

    def on_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Protected]:
        return {layer: self.of(layer, weight) for layer, weight in weights.items()}

    def of(self, layer: str, weight: Tensor) -> Protected:
        """The directions of one weight (d_out, d_in)."""
        try:
            left, right = singular_directions(weight, self.k or max(1, min(weight.shape) // 2))
        except ValueError as error:
            raise InvalidValue(f"{layer}: {error}") from None
        return Protected(right, left)


@dataclass(frozen=True)
class EarlierRows:
    """The rows of the frozen earlier blocks at each layer, orthonormalized, as O-LoRA wants them left alone."""

    def on_layers(self, anchor: Anchor) -> dict[str, Protected]:
        for layer in anchor.layers:
            if layer.history is None:
                raise InvalidValue(f"{layer.name} has no frozen rows of earlier blocks; pass history= to Anchor.of")
        return {layer.name: Protected(row_space([layer.history.A])) for layer in anchor.layers if layer.history is not None}

    def on_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Protected]:
        raise InvalidValue("plain weights have no rows of earlier blocks; audit them on FeatureCores or WeightDirections")


def row_space(blocks: Sequence[Tensor]) -> Subspace:
    """An orthonormal basis (d_in, k) of the rows of routing factors (r, d_in), k their numerical rank."""
    rows = torch.cat([in_float64(A.detach()) for A in blocks])
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    k = int((values > values[0] * max(rows.shape) * torch.finfo(rows.dtype).eps).sum())
    return Subspace(right[:k].T.contiguous())
