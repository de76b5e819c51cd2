"""Protected directions of each layer: feature cores, singular vectors of the weight, or rows of earlier blocks.

right  V  (d_in, k)  directions that the layer reads: dW V should be zero
left   U  (d_out, k)  directions that it writes: U^T dW should be zero; only singular vectors have them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from anchorlora.adapters import NOTHING, Anchor, lora_layers
from anchorlora.devices import in_float64, type_name
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Subspace, singular_directions


@dataclass(frozen=True, eq=False)
class Protected:
    """Protected directions of one layer: `right` (d_in, k), `left` (d_out, k)."""

    right: Subspace  # input directions V, (d_in, k)
    left: Subspace | None = None  # output directions U, (d_out, k); None protects the input side alone

    def fits(self, layer: str, *, d_in: int, d_out: int) -> Protected:
        """Return the directions themselves if they have the widths of a layer."""
        if self.right.d != d_in:
            raise InvalidValue(
                f"the core of {layer} has width {self.right.d}, but the layer reads {d_in} inputs; they are another model's"
            )
        if self.left is not None and self.left.d != d_out:
            raise InvalidValue(f"the left directions of {layer} have width {self.left.d}, but the layer writes {d_out} outputs")
        return self


class DirectionSource(Protocol):
    """Source of protected directions, for adapted layers or for plain weights.

    `FeatureCores`, `WeightDirections` and `EarlierRows` are the ones here; any object with these two methods is another.
    """

    def on_layers(self, anchor: Anchor) -> dict[str, Protected]:
        """Return the protected directions of every adapted layer, by its path.

        Args:
            anchor: The adapted layers.
        """

    def on_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Protected]:
        """Return the protected directions of plain weights, by their names.

        Args:
            weights: Name -> weight (d_out, d_in).
        """


@dataclass(frozen=True, eq=False)
class FeatureCores:
    """Protect the core of each layer: the directions that the features of earlier tasks span.

    Args:
        cores: Layer path or weight name -> core (d_in, k). An adapted layer that is not named keeps the core of its anchor.

    Example:
        >>> from anchorlora import Anchor
        >>> model = tiny()
        >>> anchor = Anchor.of(model, cores=cores_of(model, k=3))
        >>> {directions.right.k for directions in FeatureCores().on_layers(anchor).values()}
        {3}
    """

    cores: Mapping[str, Subspace] = field(default_factory=lambda: NOTHING)

    def on_layers(self, anchor: Anchor) -> dict[str, Protected]:
        """Return the core of every adapted layer, by its path.

        Args:
            anchor: The adapted layers.

        Raises:
            InvalidValue: A layer has no core, neither here nor in the anchor.
        """
        cores = {layer.name: self.cores.get(layer.name, layer.core) for layer in anchor.layers}
        if missing := [path for path, core in cores.items() if core is None]:
            raise InvalidValue(f"no core to audit at {missing[0]}; pass cores=rows.cores() to Anchor.of, or name other directions")
        return {path: Protected(core) for path, core in cores.items() if core is not None}

    def on_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Protected]:
        """Return the cores of plain weights, by their names.

        Args:
            weights: Name -> weight (d_out, d_in).

        Raises:
            InvalidValue: A weight has no core here.
        """
        if missing := sorted(set(weights) - set(self.cores)):
            raise InvalidValue(f"no core to audit at {missing[0]}; give FeatureCores one for every layer that is watched")
        return {layer: Protected(self.cores[layer]) for layer in weights}


@dataclass(frozen=True)
class WeightDirections:
    """Protect the k leading singular directions of each weight, on both sides, as OSF does.

    Args:
        k: Directions per side; None takes half of the smaller side, as in PEFT.

    Example:
        >>> directions = WeightDirections(k=2).of("proj", torch.randn(6, 4))
        >>> directions.right.basis.shape, directions.left.basis.shape
        (torch.Size([4, 2]), torch.Size([6, 2]))
    """

    k: int | None = None

    def on_layers(self, anchor: Anchor) -> dict[str, Protected]:
        """Return the singular directions of the base weight of every adapted layer, by its path.

        Args:
            anchor: The adapted layers, with their model.

        Raises:
            InvalidValue: The anchor has no model, or a weight has fewer than k directions.
        """
        if anchor.model is None:
            raise InvalidValue(
                "singular directions are those of the base weights, and this anchor has no model; use Anchor.of(model)"
            )
        layers = lora_layers(anchor.model)
        return {layer.name: self.of(layer.name, layers[layer.name].get_base_layer().weight) for layer in anchor.layers}

    def on_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Protected]:
        """Return the singular directions of plain weights, by their names.

        Args:
            weights: Name -> weight (d_out, d_in).

        Raises:
            InvalidValue: A weight has fewer than k directions.
        """
        return {layer: self.of(layer, weight) for layer, weight in weights.items()}

    def of(self, layer: str, weight: Tensor) -> Protected:
        """Return the singular directions of one weight.

        Args:
            layer: Name of the layer, for the message.
            weight: (d_out, d_in).

        Raises:
            InvalidValue: The weight has fewer than k directions, or is quantized.
        """
        if not weight.is_floating_point() or weight.dtype.itemsize == 1:  # scales that lie beside it change its directions
            raise InvalidValue(
                f"{layer} is stored in {type_name(weight.dtype)}: without its scales, it has other singular directions than the "
                "weight that it stands for; give the model in full precision"
            )
        try:
            left, right = singular_directions(weight, self.k or max(1, min(weight.shape) // 2))
        except ValueError as error:
            raise InvalidValue(f"{layer}: {error}") from None
        return Protected(right, left)


@dataclass(frozen=True)
class EarlierRows:
    """Protect the rows of A of the frozen earlier blocks, orthonormalized, as O-LoRA does.

    Example:
        >>> from anchorlora import Anchor
        >>> model = tiny()
        >>> model.add_adapter("earlier", model.peft_config["default"])
        >>> model.base_model.set_adapter(["default", "earlier"])
        >>> anchor = Anchor.of(model, adapter_name="default", history="earlier")
        >>> {directions.right.k for directions in EarlierRows().on_layers(anchor).values()}
        {4}
    """

    def on_layers(self, anchor: Anchor) -> dict[str, Protected]:
        """Return the row space of the earlier blocks at every adapted layer, by its path.

        Args:
            anchor: The adapted layers, with `history`.

        Raises:
            InvalidValue: A layer has no earlier blocks.
        """
        for layer in anchor.layers:
            if layer.history is None:
                raise InvalidValue(f"{layer.name} has no frozen rows of earlier blocks; pass history= to Anchor.of")
        return {layer.name: Protected(row_space([layer.history.A])) for layer in anchor.layers if layer.history is not None}

    def on_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Protected]:
        """Refuse plain weights, which have no earlier blocks.

        Args:
            weights: Name -> weight.

        Raises:
            InvalidValue: Always.
        """
        raise InvalidValue("plain weights have no rows of earlier blocks; audit them on FeatureCores or WeightDirections")


def row_space(blocks: Sequence[Tensor]) -> Subspace:
    """Return an orthonormal basis of the rows of several factors A: `blocks` (r, d_in)."""
    rows = torch.cat([in_float64(A.detach()) for A in blocks])
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    k = int((values > values[0] * max(rows.shape) * torch.finfo(rows.dtype).eps).sum())
    return Subspace(right[:k].T.contiguous())
