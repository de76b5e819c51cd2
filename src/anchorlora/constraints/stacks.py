"""Layers of one shape as one batch: on an accelerator, a constraint then costs a few kernel launches instead of some per layer.

    factors  (n, r, d_in) or (n, d_out, r)      bases  (n, d_in, k), with zero columns where a layer protects fewer directions

A zero column changes no projection. On a CPU, where a launch costs nothing, and on devices without float64, a stack is one layer,
whose tensors have no first dimension: what is written with @, .mT and the last two dimensions does for both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.checks import core_of
from anchorlora.devices import float64_device, placed, torch

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers whose factors have one shape, type and device, or one layer by itself."""

    layers: tuple[AdaptedLayer, ...]  # the layers, at least one
    batched: bool = True  # whether the first dimension of its tensors is that of the layers; otherwise, it has one
    _known: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def once(self, what: str, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that does not change while a task is trained; a batched one is made when it is first asked for."""
        if not self.batched:
            return make()
        if what not in self._known:
            self._known[what] = make()
        return self._known[what]

    def of(self, read: Callable[[AdaptedLayer], Tensor]) -> Tensor:
        """Return a tensor of every layer, stacked."""
        return self.joined([read(layer) for layer in self.layers])

    def joined(self, tensors: list[Tensor]) -> Tensor:
        """Return one tensor of each layer, or of some, as one."""
        return torch.stack(tensors) if self.batched else tensors[0]

    @property
    def product(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Matrix product of its tensors: `@` would take two steps for those with a first dimension."""
        return torch.bmm if self.batched else torch.mm

    def factor(self, name: str) -> Tensor:
        """Return the live factors; batched ones are copies."""
        return self.of(lambda layer: layer.factor(name).detach())

    def start(self, name: str) -> Tensor:
        """Return the factors at the start of the task, once no constraint moves it any more."""
        return self.once(f"start {name}", lambda: self.of(lambda layer: layer.start_factor(name)))

    def write(self, name: str, values: Tensor) -> None:
        """Write to the live factors: `values` (n, ..)."""
        self.write_to([layer.rows(name) for layer in self.layers], values)

    def write_to(self, tensors: list[Tensor], values: Tensor) -> None:
        """Write to one tensor of each layer: `values` (n, ..)."""
        if self.batched:
            torch._foreach_copy_(tensors, list(values.to(tensors[0].dtype).unbind()))
        else:
            tensors[0].copy_(values)

    def bases(self, read: Callable[[AdaptedLayer], Tensor]) -> Tensor:
        """Return a basis of every layer, padded with zero columns: `read` (d, k)."""
        matrices = [read(layer) for layer in self.layers]
        if not self.batched:
            return matrices[0]
        widest = max(basis.shape[1] for basis in matrices)
        return torch.stack([torch.nn.functional.pad(basis, (0, widest - basis.shape[1])) for basis in matrices])


def stacked_cores(anchor: Anchor, factor: str) -> list[tuple[Stack, Tensor]]:
    """Return the anchor's layers in stacks, each with V (n, d_in, k) in float64; layers whose core is of tokens are left out."""
    layers = [layer for layer in anchor.layers if layer.core is None or layer.core.tokens is None]
    cores = {layer.name: core_of(layer).basis for layer in layers}
    out = []
    for stack in stacks_of(layers, factor):
        device = stack.layers[0].rows(factor).device
        bases = stack.bases(lambda layer: cores[layer.name])
        out.append((stack, placed(bases, torch.float64, device) if stack.batched else bases))
    return out


def outside(rows: Tensor, V: Tensor) -> Tensor:
    """Project rows off their layer's core, x - x V V^T: `rows` (n, r, d_in) and `V` (n, d_in, k), or those of one layer."""
    return rows - (rows @ V) @ V.mT if rows.ndim == 2 else torch.baddbmm(rows, torch.bmm(rows, V), V.mT, alpha=-1)


def plus_product(x: Tensor, left: Tensor, right: Tensor, *, scale: float = 1) -> Tensor:
    """Return scale (x + left @ right), of a stack (n, ..) in one launch."""
    return scale * (left @ right + x) if x.ndim == 2 else torch.baddbmm(x, left, right, beta=scale, alpha=scale)


def stacks_of(layers: Sequence[AdaptedLayer], *names: str) -> list[Stack]:
    """Return the layers in stacks of one shape in these factors; each by itself where that is better, or without names."""
    groups: dict[Hashable, list[AdaptedLayer]] = {}
    for layer in layers:
        rows = [layer.rows(name) for name in names]
        if not rows or rows[0].device.type == "cpu" or float64_device(rows[0].device) != rows[0].device:
            return [Stack((layer,), batched=False) for layer in layers]
        key: Any = (layer.current.scale, *((tuple(factor.shape), factor.dtype, factor.device) for factor in rows))
        groups.setdefault(key, []).append(layer)
    return [Stack(tuple(group)) for group in groups.values()]


def add_gradients(stack: Stack, gradients: Mapping[str, Tensor], *, weight: float) -> None:
    """Add weighted gradients (n, ..) of a stack to its factors that train, by their names."""
    from anchorlora.adapters.sharding import as_split

    pairs: list[tuple[Any, Tensor]] = []
    for name, gradient in gradients.items():
        factors, parts = [layer.factor(name) for layer in stack.layers], gradient.unbind() if stack.batched else [weight * gradient]
        pairs += [(p, as_split(part, p)) for p, part in zip(factors, parts, strict=True) if p.requires_grad]
    weight = weight if stack.batched else 1.0
    if there := [(p.grad, part) for p, part in pairs if p.grad is not None]:
        torch._foreach_add_([grad for grad, _ in there], [part for _, part in there], alpha=weight)
    for p, part in pairs:
        if p.grad is None:
            p.grad = weight * part
