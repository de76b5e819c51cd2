"""Bilinear optimization divergence: how far a task moved each layer, and how much of it on protected directions   (paper, eqs.
38-41).

dW_l   = s (B A - B_0 A_0)            effective change of layer l since the start of the task, thin, float64
D_eff  = sqrt(sum_l |dW_l|^2)         D_old = sqrt(sum_l |dW_l V_l|^2)         D_new = sqrt(sum_l |dW_l P_l|^2)
rho    = D_old / (D_eff + 1e-12)      the share of the change that historical features see
chance = sqrt(sum_l k_l/d_l |dW_l|^2) / D_eff      what an unaligned change would read
floor  = unit sqrt(sum_l (s |B| |A| sqrt(k/(d r)))^2) / D_eff     what rounding alone explains; unit 2^-24 / sqrt 3 for float32
KL     = sum_l (1/2) tr(G_l dW_l C_l dW_l^T)      forecast for earlier answers, where what they depend on is remembered
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from anchorlora.adapters import NOTHING, AdaptedLayer, Anchor
from anchorlora.adapters.layers import as_subspace
from anchorlora.constraints.sensitivity import knows, sensitivity
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidType, InvalidValue, NotFinite
from anchorlora.geometry import Factors, LayerCore, Product, Subspace
from anchorlora.geometry.subspace import TokenRows
from anchorlora.store.record import is_zero, largest_zero
from anchorlora.text import amount

Added = TypeVar("Added", bound="Sums")
EPSILON = 1e-12
TELLING = 10  # a zero is evidence only where it lies this many times below what an unaligned change would read
ROWS_AT_ONCE = 128  # in float64: what stays in a processor's cache


def rounding(dtype: torch.dtype) -> float:
    """Return the rms relative error of one rounding: 2^-24 / sqrt 3 for float32."""
    return torch.finfo(dtype).eps / 2 / math.sqrt(3)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the storage type that rounds most."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def storage_floor(now: Factors, start: Factors | None, *, k: int, d: int) -> float:
    """Return the norm on k of d directions that rounding explains: of cores to float32, and of the factors and their start to the
    type that they are stored in.
    """
    stored = [x.dtype for factors in (now, start) if factors is not None for x in (factors.A, factors.B)]
    return now.storage_floor(k=k, d=d, unit=rounding(coarsest((torch.float32, *stored))))


@dataclass(frozen=True)
class Drift:
    """How far the adapted layers moved since their anchor, and how much of it on their cores.

    Norms are in the weights' own units, ratios are fractions. Ratios are None when nothing moved.

    Args:
        d_eff: Norm of the effective change, |dW|.
        d_old: Norm of the change on the cores, |dW V|.
        d_new: Norm of the change off the cores, |dW P|.
        d_block: Norm of the current block's own part in the change; differs from `d_eff` only with gates.
        rho: `d_old / d_eff`, the share of the change that lies on protected directions.
        rho_floor: The rho that rounding of the factors, as they are stored, alone explains.
        chance: The rho of an unaligned change of the same size.
        layers: The same for each layer, by its path.
        outside: One sentence for each layer that changed in something other than its factors, and one for what changed outside the
            layers; the numbers do not contain that.
        unprotected: Layers of the model that train or compute with an adapter and are not protected at all, by their paths.

    Example:
        >>> from anchorlora import Anchor, measure
        >>> model = tiny()
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> for p in model.parameters():
        ...     p.data += 0.1 * torch.randn_like(p) * p.requires_grad
        >>> drift = measure(anchor)
        >>> drift.exact, 0 < drift.rho < 1
        (False, True)
        >>> sorted(drift.layers)[0]
        'model.layers.0.self_attn.q_proj'
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
    unprotected: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the verdict in sentences, with what is not protected."""
        over = f"over {amount(len(self.layers), 'protected layer')}"
        if self.rho is None:
            sentences = [f"Nothing moved, {over}"]
        else:
            more = "no more" if is_zero(self.rho, self.rho_floor) else "more"
            explained = f"than rounding explains ({self.bound:.1e})"
            sentences = [f"rho is {self.rho:.1e}: {more} of the change lies on protected directions {explained}, {over}"]
            if more == "no more" and not self.resolved:
                sentences.append(f"Rounding hides the answer: an unaligned change reads {self.chance:.1e}")
        sentences += self.outside
        if self.unprotected:
            others = f" and {len(self.unprotected) - 4} more" if len(self.unprotected) > 4 else ""
            sentences.append(f"Not protected at all: {', '.join(self.unprotected[:4])}{others}")
        return ". ".join(sentences) + "."

    @property
    def exact(self) -> bool:
        """True if rho is no larger than rounding explains, which can be told, and nothing but the factors moved."""
        return is_zero(self.rho, self.rho_floor) and self.resolved and not self.outside

    @property
    def bound(self) -> float:
        """The numerical tolerance of rho: the largest value that rounding explains."""
        return largest_zero(self.rho_floor)

    @property
    def resolved(self) -> bool:
        """False if rounding hides whether anything was protected: the tolerance comes near the rho of a random change."""
        return not self.chance or TELLING * self.bound <= self.chance

    def as_dict(self) -> dict[str, float | None]:
        """Return the numbers by name, without the layers."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS = ("d_eff", "d_old", "d_new", "d_block", "rho", "rho_floor", "chance")


@dataclass(frozen=True)
class Sums:
    """Numbers that add up over layers, field by field."""

    def __add__(self: Added, other: Added) -> Added:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Squares(Sums):
    """Squared norms of one layer, which add up over layers."""

    eff: float = 0.0
    old: float = 0.0
    new: float = 0.0
    block: float = 0.0
    floor: float = 0.0
    chance: float = 0.0

    @classmethod
    def of(cls, change: Product, core: Subspace, *, floor: float) -> Squares:
        """Return the squared norms of a change on and off a core: `change` (d_out, d_in)."""
        change = change.thinned()
        core = core.to(dtype=torch.float64, device=change.right.device)
        eff, old, new = (float(part.norm()) ** 2 for part in (change, change.on(core), change.off(core)))
        return cls(eff, old, new, eff, floor**2, core.k / core.d * eff)


def measure(anchor: Anchor, cores: Mapping[str, Subspace | LayerCore | Tensor] = NOTHING) -> Drift:
    """Measure how far every layer moved since the anchor, and how much of it on its core   (paper, eqs. 38-41).

    It measures what the model computes with now, even where its factors or their scale were replaced. Whatever else changed stands
    in `Drift.outside`, and what is not protected at all in `Drift.unprotected`. Factors are read, never written; norms are float64.

    Args:
        anchor: The anchor that the change is measured from.
        cores: Layer path -> directions (d_in, k) to measure on; a layer that is not named uses its own core.

    Returns:
        The drift of all layers together, with every layer's own in `layers`.

    Raises:
        InvalidValue: A layer has no core and none was given.
        NotFinite: Factors hold NaN or infinite values.

    Example:
        >>> from anchorlora import Anchor, measure
        >>> model = tiny()
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> drift = measure(anchor)
        >>> drift.d_eff, drift.rho  # nothing has moved
        (0.0, None)
        >>> for p in model.parameters():
        ...     p.data += 0.1 * torch.randn_like(p) * p.requires_grad
        >>> print(measure(anchor))  # doctest: +ELLIPSIS
        rho is ...: more of the change lies on protected directions than rounding explains (...), over 4 protected layers.
    """
    if not hasattr(anchor, "live"):
        raise InvalidType(f"{type(anchor).__name__} is no anchor; give the one that training began with, of Anchor.of")
    live = anchor.live()
    squares = {
        layer.name: _squares(layer, cores.get(layer.name, layer.core), live.get(layer.name, layer.current))
        for layer in (*anchor.layers, *(anchor.beside.layers if anchor.beside else ()))
    }
    if wrong := next((layer for layer, of_layer in squares.items() if not math.isfinite(of_layer.eff)), None):
        raise NotFinite(f"the factors of {wrong} hold NaN or infinite values, so nothing can be measured; go back to finite ones")
    outside, beside = anchor.changed(), anchor.changed_beside()
    if beside:
        more = f" and {amount(len(beside) - 1, 'more parameter')}" if len(beside) > 1 else ""
        outside.append(f"{beside[0]}{more} outside the protected layers changed")
    return replace(sum_up(squares), outside=tuple(outside), unprotected=tuple(anchor.unprotected()))


def rho_on(anchor: Anchor, cores: Mapping[str, Subspace]) -> float | None:
    """Return the rho of `measure(anchor, cores)` alone, at less cost for cores of many directions: `cores` (d_in, k)."""
    old = eff = 0.0
    for layer in anchor.layers:
        change = layer.change().thinned()
        core = cores[layer.name].to(dtype=torch.float64, device=change.right.device)
        old, eff = old + float(change.on(core).norm()) ** 2, eff + float(change.norm()) ** 2
    return math.sqrt(old) / (math.sqrt(eff) + EPSILON) if eff > 0 else None


def sum_up(squares: Mapping[str, Squares]) -> Drift:
    """Return the drift of all layers together, with every layer's own."""
    total = sum(squares.values(), Squares())
    return _drift(total, {layer: _drift(layer_squares, NOTHING) for layer, layer_squares in squares.items()})


def held_out_drift(anchor: Anchor, rows: Mapping[str, Tensor]) -> dict[str, float] | None:
    """Measure what the change does to held-out feature rows of the past, relative to the rows: |dW X^T| / |X| over all layers."""
    sums = dict.fromkeys(("size", "total", "on_core", "off_core"), 0.0)
    sharing: dict[int, list[AdaptedLayer]] = {}  # layers of one store have the same rows, which are gone through once
    for layer in (adapted for adapted in anchor.layers if adapted.name in rows):
        sharing.setdefault(id(rows[layer.name]), []).append(layer)
    for layers in sharing.values():
        parts = [(_on_cpu(s.change()).thinned(), _core(s, s.core).to(dtype=torch.float64, device="cpu")) for s in layers]
        asked = [matrix for change, core in parts for matrix in (change.right, core.basis.T)]
        thin = torch.cat(asked).T  # all else is as thin as the block
        for some in rows[layers[0].name].split(ROWS_AT_ONCE):
            x = in_float64(some)
            outputs = (x @ thin).split([len(matrix) for matrix in asked], dim=1)
            for (change, core), read, coordinates in zip(parts, outputs[::2], outputs[1::2], strict=True):
                inside = coordinates @ core.coordinates(change.right).T
                for name, part in (("total", read), ("on_core", inside), ("off_core", read - inside)):
                    sums[name] += float((part @ change.left.T).square().sum())
            sums["size"] += len(layers) * float(torch.linalg.vector_norm(x)) ** 2
    size = sums.pop("size")
    return {name: math.sqrt(value / size) for name, value in sums.items()} if size else None


def predicted_kl(anchor: Anchor) -> float | None:
    """Predict how far the change moves the answers of finished tasks: sum over layers of (1/2) tr(G dW C dW^T).

    It takes layers, tokens, and the two sides of a layer as independent, so it ranks changes but is too low where they move an
    answer together: hundreds of times for a fold of all linear layers of a small chat model.
    """
    if not knows(anchor.past):
        return None
    total = 0.0
    for layer in anchor.layers:
        change = _on_cpu(layer.change())
        left, right = in_float64(change.left), in_float64(change.right)
        C, G = sensitivity(anchor.past, layer.name, d_in=right.shape[1], d_out=left.shape[0])
        total += 0.5 * float(((left.T @ G.times(left)) * (right @ C.times(right.T))).sum())
    return total


def _squares(layer: AdaptedLayer, given: Subspace | LayerCore | Tensor | None, live: Factors) -> Squares:
    core = _core(layer, given)
    floor = storage_floor(live.whole(), layer.start, k=core.k, d=core.d)
    squares = Squares.of(layer.change(live), core, floor=floor)
    return replace(squares, block=float(layer.block_change().norm()) ** 2) if layer.gated else squares


def _drift(squares: Squares, layers: Mapping[str, Drift]) -> Drift:
    eff, old, new, block, floor, chance = map(math.sqrt, vars(squares).values())
    rho, rho_floor, of_random = (old / (eff + EPSILON), floor / eff, chance / eff) if eff > 0 else (None, None, None)
    return Drift(eff, old, new, block, rho, rho_floor, of_random, layers)


def _core(layer: AdaptedLayer, given: Subspace | LayerCore | Tensor | None) -> Subspace:
    if isinstance(given, Tensor) and layer.core is not None and layer.core.tokens is not None:
        return TokenRows(given, d=layer.core.d)
    if (core := as_subspace(given, at=layer.name)) is None:
        raise InvalidValue(f"no core to measure on at {layer.name}; pass cores=store.cores() to Anchor.of or to measure")
    return core


def _on_cpu(product: Product) -> Product:
    return Product(product.left.cpu(), product.right.cpu())
