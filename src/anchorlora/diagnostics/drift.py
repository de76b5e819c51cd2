"""Bilinear optimization divergence: what a task did to the directions it should have left alone   (paper, eq. 38 to 41).

dW_l   = s (B A - B_0 A_0)            effective change of layer l since the start of the task, thin, float64
D_eff  = sqrt(sum_l |dW_l|^2)         D_old = sqrt(sum_l |dW_l V_l|^2)         D_new = sqrt(sum_l |dW_l P_l|^2)
rho    = D_old / (D_eff + 1e-12)      the share of the change that historical features see
chance = sqrt(sum_l k_l/d_l |dW_l|^2) / D_eff      what an unaligned change would read
floor  = (2^-24 / sqrt 3) sqrt(sum_l (s |B| |A| sqrt(k/(d r)))^2) / D_eff     what float32 storage alone explains
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from anchorlora.adapters import NOTHING, AdaptedLayer, Anchor
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Factors, Product, Subspace
from anchorlora.schemas.record import is_zero, largest_zero

EPSILON = 1e-12
ROWS_AT_ONCE = 128  # in float64: what stays in a processor's cache


def rounding(dtype: torch.dtype) -> float:
    """The rms relative error of one rounding to a float type: 2^-24 / sqrt 3 for float32."""
    return torch.finfo(dtype).eps / 2 / math.sqrt(3)


ROUNDING = rounding(torch.float32)


@dataclass(frozen=True)
class Drift:
    """Norms in native units and ratios as fractions; ratios are None when nothing moved.  `layers`: the same per site.

    outside: what else of the layers has changed since the anchor, a sentence each; the numbers know nothing of it.
    """

    d_eff: float
    d_old: float
    d_new: float
    d_block: float
    rho: float | None
    rho_floor: float | None
    chance: float | None
    layers: Mapping[str, Drift] = field(default_factory=dict, repr=False)
    outside: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the core saw no more than float32 storage explains, and nothing but the factors moved."""
        return is_zero(self.rho, self.rho_floor) and not self.outside

    @property
    def bound(self) -> float:
        """The largest rho that still counts as zero."""
        return largest_zero(self.rho_floor)

    def as_dict(self) -> dict[str, float | None]:
        """The fields as numbers, without the layers."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS = ("d_eff", "d_old", "d_new", "d_block", "rho", "rho_floor", "chance")


@dataclass(frozen=True)
class Squares:
    """Squared norms of one layer, which add up over layers."""

    eff: float = 0.0
    old: float = 0.0
    new: float = 0.0
    block: float = 0.0
    floor: float = 0.0
    chance: float = 0.0

    @classmethod
    def of(cls, change: Product, core: Subspace, *, floor: float) -> Squares:
        """A thin change (d_out, d_in) on a core of its inputs; floor: the norm on the core that rounding of factors explains."""
        change = change.thinned()
        core = core.to(dtype=torch.float64, device=change.right.device)
        eff, old, new = (float(part.norm()) ** 2 for part in (change, change.on(core), change.off(core)))
        return cls(eff, old, new, eff, floor**2, core.k / core.d * eff)

    def __add__(self, other: Squares) -> Squares:
        return Squares(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def measure(anchor: Anchor, cores: Mapping[str, Subspace] = NOTHING) -> Drift:
    """How far every site moved since its anchor, and how much of it on its core; reads, never writes.

    Measured is what the model computes with now, also where its factors or their scale were replaced; of anything else that
    changed `outside` tells. cores: other directions to measure on, by layer; the sites' own by default. Raises ValueError for a
    site without any.
    """
    live = anchor.live()
    squares = {s.name: _squares(s, cores.get(s.name, s.core), live.get(s.name, s.current)) for s in anchor.layers}
    return replace(summed(squares), outside=tuple(anchor.changed()))


def rho_on(anchor: Anchor, cores: Mapping[str, Subspace]) -> float | None:
    """The rho of `measure(anchor, cores)` alone, for cores of many directions."""
    old = eff = 0.0
    for layer in anchor.layers:
        change = layer.change().thinned()
        core = cores[layer.name].to(dtype=torch.float64, device=change.right.device)
        old, eff = old + float(change.on(core).norm()) ** 2, eff + float(change.norm()) ** 2
    return math.sqrt(old) / (math.sqrt(eff) + EPSILON) if eff > 0 else None


def summed(squares: Mapping[str, Squares]) -> Drift:
    """The drift of all layers together, with every layer's own."""
    total = sum(squares.values(), Squares())
    return _drift(total, {layer: _drift(each, NOTHING) for layer, each in squares.items()})


def storage_floor(factors: Factors, *, k: int, d: int, unit: float = ROUNDING) -> float:
    """The norm on k of d directions that rounding of the factors explains: unit s |B| |A| sqrt(k/(d r))."""
    A, B = in_float64(factors.A.detach()), in_float64(factors.B.detach())
    return unit * factors.scale * float(B.norm()) * float(A.norm()) * math.sqrt(k / (d * factors.rank))


def held_out_drift(anchor: Anchor, rows: Mapping[str, Tensor]) -> dict[str, float] | None:
    """What the change does to past feature rows that no core was made of, relative to the rows.

    rows: layer -> X (n, d_in), or other rows of the same X^T X. total = |dW X^T| / |X| over all layers; on_core and off_core: the
    same for the parts of the rows inside and outside the layer's core (their outputs may cancel, so the parts need not add up).
    None where all rows are zero, so that nothing is relative to them.
    """
    sums = dict.fromkeys(("size", "total", "on_core", "off_core"), 0.0)
    sharing: dict[int, list[AdaptedLayer]] = {}  # layers of one store have the same rows, which are gone through once
    for layer in anchor.layers:
        sharing.setdefault(id(rows[layer.name]), []).append(layer)
    for layers in sharing.values():
        parts = [(_on_cpu(s.change()).thinned(), _core(s, s.core).to(dtype=torch.float64, device="cpu")) for s in layers]
        asked = [matrix for change, core in parts for matrix in (change.right, core.basis.T)]
        thin = torch.cat(asked).T  # all else is as thin as the block
        for some in rows[layers[0].name].split(ROWS_AT_ONCE):
            x = in_float64(some)
            found = (x @ thin).split([len(matrix) for matrix in asked], dim=1)
            for (change, core), read, coordinates in zip(parts, found[::2], found[1::2], strict=True):
                inside = coordinates @ core.coordinates(change.right).T
                for name, part in (("total", read), ("on_core", inside), ("off_core", read - inside)):
                    sums[name] += float((part @ change.left.T).square().sum())
            sums["size"] += len(layers) * float(torch.linalg.vector_norm(x)) ** 2
    size = sums.pop("size")
    return {name: math.sqrt(value / size) for name, value in sums.items()} if size else None


def _squares(layer: AdaptedLayer, core: Subspace | None, live: Factors) -> Squares:
    core = _core(layer, core)
    squares = Squares.of(layer.change(live), core, floor=storage_floor(live.whole(), k=core.k, d=core.d))
    return replace(squares, block=float(layer.block_change().norm()) ** 2) if layer.gated else squares


def _drift(squares: Squares, layers: Mapping[str, Drift]) -> Drift:
    eff = math.sqrt(squares.eff)
    moved = eff > 0
    return Drift(
        d_eff=eff,
        d_old=math.sqrt(squares.old),
        d_new=math.sqrt(squares.new),
        d_block=math.sqrt(squares.block),
        rho=math.sqrt(squares.old) / (eff + EPSILON) if moved else None,
        rho_floor=math.sqrt(squares.floor) / eff if moved else None,
        chance=math.sqrt(squares.chance) / eff if moved else None,
        layers=layers,
    )


def _core(layer: AdaptedLayer, core: Subspace | None) -> Subspace:
    if core is None:
        raise InvalidValue(f"no core to measure on at {layer.name}; pass cores=rows.cores() to Anchor.of or to measure")
    return core


def _on_cpu(product: Product) -> Product:
    return Product(product.left.cpu(), product.right.cpu())
