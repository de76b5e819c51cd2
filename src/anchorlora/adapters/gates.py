"""Gates of stacked adapters: one trainable scalar per task for the whole network   (SD-LoRA, Wu et al. 2025).

    dW_l = s sum_j m_j B_j A_j       m_j = a_j / c_j      a_j  gate      c_j  size of adapter j: rms over layers of |B_j| |A_j|

A finished adapter counts as a direction of size 1 times its gate: when its task ends, a <- a c, so m and the function stay. The
adapter that trains has size 1 (with B = 0 it has no direction yet). Factors stay as they were trained: m acts only on the r
activations between A and B, so no factor is rescaled and the history stays bitwise the same.

Normalized by layer (`Gates.layers`), with c_jl = |B_jl| |A_jl| of each layer and a'_j the gate when the task ended:

    m_jl = a'_j / c_j + (a_j - a'_j) / c_jl

One gate moves every layer's part by the same amount, whatever size it was trained to, and the end of a task keeps the function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anchorlora.devices import in_float64
from anchorlora.geometry import Factors, Product

LAYER = ("size", "offset")  # of a layer, in the state


class Gates:
    """Gates of a stack of adapters, oldest first; the last one belongs to the adapter that trains, if one is open."""

    def __init__(self, values: Tensor, sizes: Tensor, layers: Mapping[str, tuple[Tensor, Tensor]] | None = None) -> None:
        self.values, self.sizes = nn.Parameter(values), sizes
        self.layers = None if layers is None else dict(layers)  # where each layer's own size normalizes: sizes c_jl, and offsets

    @classmethod
    def none(cls, device: torch.device, *, by_layer: bool) -> Gates:
        """Return the gates of an empty stack."""
        return cls(torch.zeros(0, device=device), torch.zeros(0, device=device), {} if by_layer else None)

    def __len__(self) -> int:
        return len(self.sizes)

    def open(self, value: float) -> None:
        """Add a gate for a new adapter."""
        with torch.no_grad():
            self.values = nn.Parameter(torch.cat([self.values, self.values.new_tensor([value])]))
            self.sizes = torch.cat([self.sizes, self.sizes.new_ones(1)])

    def close(self, block: Mapping[str, Factors]) -> None:
        """Finish the last gate's adapter: give it its size, in each layer too, and the gate the value that keeps the function."""
        sizes = sizes_of(block)
        size = (sum(size**2 for size in sizes.values()) / len(sizes)) ** 0.5
        if size > 0:  # an adapter that never moved has no direction to normalize
            with torch.no_grad():
                self.values[-1] *= size
                self.sizes[-1] = size
        if self.layers is None:
            return
        gate, whole = self.values.detach()[-1:], self.sizes[-1:]
        for layer, size in sizes.items():
            closing = whole.new_tensor([size]) if size > 0 else whole
            former, offsets = self.layers.get(layer, (whole[:0], whole[:0]))
            self.layers[layer] = (torch.cat([former, closing]), torch.cat([offsets, gate / whole - gate / closing]))

    def multipliers(self, layer: str) -> Tensor:
        """Return m (t,) of a layer, with gradients to the gates: a / c, the same in all layers, or m_l."""
        if self.layers is None:
            return self.values / self.sizes
        sizes, offsets = self.layers.get(layer, (self.sizes[:0], self.sizes[:0]))
        training = len(self) - len(sizes)  # 1 while an adapter is open
        return self.values / torch.cat([sizes, sizes.new_ones(training)]) + torch.cat([offsets, offsets.new_zeros(training)])

    def state(self) -> dict[str, Tensor]:
        """Return copies of what `resumed` needs."""
        of_layers = (self.layers or {}).items()
        gates = {f"{what}/{layer}": t.clone() for layer, pair in of_layers for what, t in zip(LAYER, pair, strict=True)}
        return {"values": self.values.detach().clone(), "sizes": self.sizes.clone()} | gates

    @classmethod
    def resumed(cls, state: Mapping[str, Tensor], device: torch.device, layers: Iterable[str] | None) -> Gates:
        """Return gates as they were saved, of these layers where each has its own sizes."""
        values, sizes = state["values"].to(device), state["sizes"].to(device)
        if layers is None:
            return cls(values, sizes)
        return cls(values, sizes, {n: (state[f"{LAYER[0]}/{n}"].to(device), state[f"{LAYER[1]}/{n}"].to(device)) for n in layers})

    @staticmethod
    def names(layers: Iterable[str] | None) -> list[str]:
        """Return the names of the tensors (t,) in `state`."""
        return ["values", "sizes", *(f"{what}/{layer}" for layer in layers or () for what in LAYER)]


def sizes_of(block: Mapping[str, Factors]) -> dict[str, float]:
    """Return |B| |A| of every layer of an adapter."""
    return {layer: float(in_float64(f.A).norm()) * float(in_float64(f.B).norm()) for layer, f in block.items()}


@dataclass(frozen=True, eq=False)
class Gated:
    """Gates as an adapted layer sees them."""

    gates: Gates
    start: Tensor  # multipliers m (t,) of the layer at the start of the task
    layer: str

    def block(self, current: Factors, anchor: Factors) -> Product:
        """Return the change of the current adapter, s (m B A - m_0 B_0 A_0)."""
        now, then = (float(m[-1]) for m in (self._now(), in_float64(self.start)))
        return Factors(current.A, now * current.B, current.scale).since(Factors(anchor.A, then * anchor.B, anchor.scale))

    def change(self, current: Factors, anchor: Factors, frozen: Factors | None) -> Product:
        """Return the change of the whole stack: of the current adapter, and of earlier ones whose gates have moved."""
        own = self.block(current, anchor)
        if frozen is None:
            return own
        moved = (self._now() - in_float64(self.start))[:-1]
        left = frozen.scale * in_float64(frozen.B.detach()) * moved.repeat_interleave(current.rank)
        return Product(torch.cat([own.left, left], dim=1), torch.cat([own.right, in_float64(frozen.A.detach())], dim=0))

    def _now(self) -> Tensor:
        return in_float64(self.gates.multipliers(self.layer).detach())
