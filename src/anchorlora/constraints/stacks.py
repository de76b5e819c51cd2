"""Layers of one shape as one batch: on an accelerator, a constraint then costs a few kernel launches instead of some per layer.

    factors  (n, r, d_in) or (n, d_out, r)      bases  (n, d_in, k), with zero columns where a layer protects fewer directions

A zero column changes no projection. On a CPU, where a launch costs nothing, and on devices without float64, layers are taken one by
one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.checks import core_of
from anchorlora.devices import float64_device, placed

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers whose factors have one shape, type and device."""

    layers: tuple[AdaptedLayer, ...]  # the layers, at least one
    _known: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def once(self, what: str, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that does not change while a task is trained; it is made when it is first asked for."""
        if what not in self._known:
            self._known[what] = make()
        return self._known[what]

    def of(self, read: Callable[[AdaptedLayer], Tensor]) -> Tensor:
        """Return a tensor of every layer, stacked."""
        import torch

        return torch.stack([read(layer) for layer in self.layers])

    def factor(self, name: str) -> Tensor:
        """Return the live factors, copied."""
        return self.of(lambda layer: layer.factor(name).detach())

    def write(self, name: str, values: Tensor) -> None:
        """Write to the live factors: `values` (n, ..)."""
        self.write_to([layer.rows(name) for layer in self.layers], values)

    def write_to(self, tensors: list[Tensor], values: Tensor) -> None:
        """Write to one tensor of each layer: `values` (n, ..)."""
        import torch

        torch._foreach_copy_(tensors, list(values.to(tensors[0].dtype).unbind()))

    def bases(self, read: Callable[[AdaptedLayer], Tensor]) -> Tensor:
        """Return a basis of every layer, padded with zero columns: `read` (d, k)."""
        import torch

        matrices = [read(layer) for layer in self.layers]
        widest = max(basis.shape[1] for basis in matrices)
        return torch.stack([torch.nn.functional.pad(basis, (0, widest - basis.shape[1])) for basis in matrices])


@dataclass(frozen=True, eq=False)
class StackedCores:
    """Stacks of layers with their cores: `stacks` (n, d_in, k)."""

    stacks: list[tuple[Stack, Tensor]]  # each stack with its bases V (n, d_in, k), in float64 on its device

    @classmethod
    def of(cls, anchor: Anchor, factor: str) -> StackedCores | None:
        """Return the anchor's layers in stacks, or None where they are better taken one by one."""
        import torch

        stacks = stacks_of(anchor.layers, factor)
        if stacks is None or any(layer.core is not None and layer.core.tokens is not None for layer in anchor.layers):
            return None
        device = anchor.layers[0].rows(factor).device
        cores = {layer.name: placed(core_of(layer).basis, torch.float64, device) for layer in anchor.layers}
        return cls([(stack, stack.bases(lambda layer: cores[layer.name])) for stack in stacks])


def outside(rows: Tensor, V: Tensor) -> Tensor:
    """Project rows onto the complement of their layer's core, x - x V V^T: `rows` (n, r, d_in), `V` (n, d_in, k)."""
    import torch

    return torch.baddbmm(rows, torch.bmm(rows, V), V.mT, alpha=-1)


def stacks_of(layers: Sequence[AdaptedLayer], *names: str) -> list[Stack] | None:
    """Return the layers in stacks, or None where they are better taken one by one."""
    groups: dict[Hashable, list[AdaptedLayer]] = {}
    for layer in layers:
        rows = [layer.rows(name) for name in names]
        if rows[0].device.type == "cpu" or float64_device(rows[0].device) != rows[0].device:
            return None
        key: Any = (layer.current.scale, *((tuple(factor.shape), factor.dtype, factor.device) for factor in rows))
        groups.setdefault(key, []).append(layer)
    return [Stack(tuple(group)) for group in groups.values()]


def add_gradients(parameters: Sequence[Any], gradients: Tensor, *, weight: float) -> None:
    """Add a weighted gradient to each parameter that trains: `gradients` (n, ..)."""
    import torch

    pairs = [(p, g) for p, g in zip(parameters, gradients.unbind(), strict=True) if p.requires_grad]
    there = [(p.grad, g) for p, g in pairs if p.grad is not None]
    if there:
        torch._foreach_add_([grad for grad, _ in there], [g for _, g in there], alpha=weight)
    for p, g in pairs:
        if p.grad is None:
            p.grad = weight * g
