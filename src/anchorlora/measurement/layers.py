"""Measure what moved between two checkpoints, what of it is protected, and which condition of the rule preserved it, by layer.

    dW = s (B_0 dA + dB A)      one LoRA block between start (A_0, B_0) and end (A, B), never formed
    dW = W - W_0                a full weight, read in float64 a few rows at a time
    rho = |dW V| / |dW|         V  (d_in, k)  protected directions;  on the left |U^T dW| / |dW|,  U  (d_out, k)

The conditions of the selection rule, measured on factors (docs/rule.md), hold when they are no larger than rounding explains. One
rounding of A leaves unit |A| sqrt(k/d) on V, where unit is its rms relative error; the tolerance is three times that, and 2 eps |A|
for float32. B must be bitwise equal.

    displacement  |dA V| / |dA|      state  |A V| / |A|      delta_b  |dB| / |B|

A block that starts with B = 0 is a zero-output block: A V = 0 preserves V for any B. A block that starts with B != 0 is a learned
anchor: dA V = 0 and dB = 0 preserve V. Rounding explains a ratio up to the numerical tolerance. Where the tolerance comes near the
ratio of a random change, the files do not show the answer, and the audit says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from anchorlora.devices import float64_device, in_float64, placed
from anchorlora.geometry import Factors, Product, Subspace
from anchorlora.measurement.directions import Protected
from anchorlora.measurement.drift import TELLING, Drift, Squares, Sums, coarsest, rounding, storage_floor, sum_up
from anchorlora.store.record import is_zero

Kind = Literal["learned anchor", "zero-output block", "other rank", "full weight", "mixed", "unmoved"]
Status = Literal["unmoved", "preserved", "unresolved", "violated"]
FLOAT32 = torch.finfo(torch.float32).eps
ROWS = 1024  # rows of a full weight that are read in float64 at a time


def square_of(x: Tensor) -> float:
    """Return the squared norm of a tensor."""
    return float(x.square().sum())


@dataclass(frozen=True)
class Condition:
    """The measured value of a condition, its numerical tolerance, and the verdict."""

    value: float | None  # the ratio that is zero when the condition holds; None where it is undefined or unknown
    bound: float | None  # the largest ratio that rounding explains; None where it is undefined or unknown
    preserved: bool | None  # True if the condition holds to rounding, False if it is violated, None where the files cannot tell


@dataclass(frozen=True)
class FactorSquares(Sums):
    """Squared norms of one layer's factors, which add up over layers."""

    moved_on: float = 0.0  # |dA V|^2
    moved: float = 0.0  # |dA|^2
    state_on: float = 0.0  # |A V|^2
    state: float = 0.0  # |A|^2
    delta_b: float = 0.0  # |dB|^2
    output: float = 0.0  # |B|^2, the larger of start and end
    noise: float = 0.0  # |E V|^2 of a rounding error E of A
    chance: float = 0.0  # k/d |dA|^2
    unknown: int = 0  # blocks whose start nobody saved

    @classmethod
    def of(cls, now: Factors, start: Factors | None, core: Subspace) -> FactorSquares:
        """Return the squared norms of one layer's factors."""
        core = core.to(dtype=torch.float64, device=float64_device(now.A.device))
        A, B = in_float64(now.A.detach()), in_float64(now.B.detach())
        state, state_on = square_of(A), square_of(core.coordinates(A))
        stored = coarsest(factors.A.dtype for factors in (now, start) if factors is not None)
        noise = rounding(stored) ** 2 * core.k / core.d * state
        held = cls(state_on=state_on, state=state, noise=noise)
        if start is None:
            return replace(held, output=square_of(B), unknown=1)
        A0, B0 = in_float64(start.A.detach()), in_float64(start.B.detach())
        moved_on, moved = square_of(core.coordinates(A - A0)), square_of(A - A0)
        delta_b, output = square_of(B - B0), max(square_of(B), square_of(B0))
        return replace(held, moved_on=moved_on, moved=moved, delta_b=delta_b, output=output, chance=core.k / core.d * moved)

    def conditions(self) -> dict[str, Condition]:
        """Return displacement, state and delta_b. The verdict is None for a displacement too small to tell from rounding."""
        zero = max((2 * FLOAT32) ** 2 * self.state, 9 * self.noise)  # squared norm on V that counts as none
        state = Condition(_ratio(self.state_on, self.state), _ratio(zero, self.state), self.state_on <= zero)
        if self.unknown:
            unknown = Condition(None, None, None)
            return {"displacement": unknown, "state": state, "delta_b": unknown}
        drowned = self.moved > 0 and TELLING**2 * zero > self.chance
        preserved = None if drowned and self.moved_on <= zero else self.moved_on <= zero
        displacement = Condition(_ratio(self.moved_on, self.moved), _ratio(zero, self.moved), preserved)
        delta_b = Condition(_ratio(self.delta_b, self.output), 0.0, self.delta_b == 0.0)
        return {"displacement": displacement, "state": state, "delta_b": delta_b}


@dataclass(frozen=True, eq=False)
class Block:
    """One adapter's block at one layer."""

    now: Factors  # factors in the later checkpoint
    start: Factors | None  # factors in the earlier one; None for a block that was not saved before its first step, when B was zero

    @property
    def moved(self) -> bool:
        """True if a single bit differs, or if a block without a saved start writes anything."""
        if self.start is None:
            return bool(self.now.B.any())
        same = self.now.scale == self.start.scale and self.now.rank == self.start.rank
        return not (same and torch.equal(self.now.A, self.start.A) and torch.equal(self.now.B, self.start.B))

    @property
    def kind(self) -> Kind:
        """How the block starts: "learned anchor", "zero-output block", or "other rank" where rank or scale changed."""
        if self.start is None or not bool(self.start.B.any()):
            return "zero-output block"
        same = self.now.rank == self.start.rank and self.now.scale == self.start.scale
        return "learned anchor" if same else "other rank"

    @property
    def change(self) -> Product:
        """The change s (B A - B_0 A_0) as a thin product, in float64."""
        return self.now.since(self.start or self.now.unborn())


@dataclass(frozen=True)
class Paths(Sums):
    """Squared norms of the two terms of dW V. They may cancel, so they need not add up."""

    displacement: float = 0.0  # |s B_0 dA V|^2
    delta_b: float = 0.0  # |s dB A V|^2, the ΔB term


@dataclass(frozen=True)
class LayerChange:
    """Squared norms of one layer, which add up over layers."""

    kinds: frozenset[Kind] = frozenset()  # how its blocks start
    right: Squares = field(default_factory=Squares)  # the change and its part on the protected input directions
    left: Squares | None = None  # the same for the output directions, if there are any
    factors: FactorSquares | None = None  # squared norms that the conditions on the factors need; None for full weights
    paths: Paths | None = None  # the two terms of dW V; None unless every block is a learned anchor
    k: int = 0  # directions and width of the inputs, of one layer
    d: int = 0  # width of its inputs; 0 for a sum over layers

    def __add__(self, other: LayerChange) -> LayerChange:
        return LayerChange(
            self.kinds | other.kinds,
            self.right + other.right,
            _plus(self.left, other.left),
            _plus(self.factors, other.factors),
            _plus(self.paths, other.paths),
        )


def block_layer(blocks: Sequence[Block], protected: Protected) -> LayerChange:
    """Return the squared norms of one adapted layer, over all of its blocks."""
    core, left = protected.right, protected.left
    moved = [block for block in blocks if block.moved]
    if not moved:
        return LayerChange(k=core.k, d=core.d, left=Squares() if left else None)
    parts = [block.change for block in moved]
    change = Product(torch.cat([p.left for p in parts], dim=1), torch.cat([p.right for p in parts], dim=0))
    factors, paths = FactorSquares(), Paths()
    for block in moved:
        anchored = block.kind != "other rank"
        factors += FactorSquares.of(block.now, block.start if anchored else None, core)
        paths += _paths(block, core) if anchored else Paths()
    right = Squares.of(change, core, floor=_floor(moved, k=core.k, d=core.d))
    writes = Squares.of(change.transposed(), left, floor=_floor(moved, k=left.k, d=left.d)) if left else None
    kinds = frozenset(block.kind for block in moved)
    return LayerChange(kinds, right, writes, factors, paths if kinds == {"learned anchor"} else None, core.k, core.d)


def weight_layer(before: Tensor, after: Tensor, protected: Protected) -> LayerChange:
    """Return the squared norms of one full weight: `before` (d_out, d_in), `after` (d_out, d_in)."""
    core, left = protected.right, protected.left
    if torch.equal(before, after):
        return LayerChange(k=core.k, d=core.d, left=Squares() if left else None)
    there = float64_device(after.device)
    V = placed(core.basis, torch.float64, there)
    U = placed(left.basis, torch.float64, there) if left else V.new_zeros(before.shape[0], 0)
    eff = old = new = size = off = 0.0
    written = V.new_zeros(U.shape[1], before.shape[1])
    for rows, dW in _moves(before, after):
        response = dW @ V
        eff, old = eff + square_of(dW), old + square_of(response)
        new += square_of(dW - response @ V.T)
        written += U[rows].T @ dW
        size += square_of(in_float64(after[rows]))
    for rows, dW in _moves(before, after) if left else ():
        off += square_of(dW - U[rows] @ written)
    unit = max(rounding(before.dtype), rounding(after.dtype)) ** 2 * size
    right = Squares(eff, old, new, eff, unit * core.k / core.d, core.k / core.d * eff)
    share = left.k / left.d if left else 0.0
    writes = Squares(eff, square_of(written), off, eff, unit * share, share * eff) if left else None
    return LayerChange(frozenset({"full weight"}), right, writes, k=core.k, d=core.d)


@dataclass(frozen=True)
class DriftReading:
    """Numbers and verdict of one layer, or of all layers together: norms in native units, ratios as fractions, or None."""

    kind: Kind  # how the layer's blocks start
    right: Drift  # drift on the protected input directions
    left: Drift | None  # drift on the protected output directions, if there are any
    conditions: Mapping[str, Condition]
    paths: Mapping[str, float] | None  # |s B_0 dA V| and |s dB A V|, each over |dW|
    k: int | None = None  # protected directions of one layer
    d: int | None = None

    @classmethod
    def of(cls, layer: LayerChange) -> DriftReading:
        """Return the reading of a layer or of a sum over layers."""
        right = sum_up({"": layer.right})
        left = sum_up({"": layer.left}) if layer.left else None
        conditions = layer.factors.conditions() if layer.factors else {}
        conditions["response"] = Condition(right.rho, right.bound, right.exact if right.resolved else None)
        paths = None
        if layer.paths and right.d_eff > 0:
            paths = {name: math.sqrt(value) / right.d_eff for name, value in vars(layer.paths).items()}
        kind: Kind = "unmoved" if not layer.kinds else next(iter(layer.kinds)) if len(layer.kinds) == 1 else "mixed"
        return cls(kind, right, left, conditions, paths, layer.k or None, layer.d or None)

    @property
    def status(self) -> Status:
        """The verdict: "unmoved", "preserved" (to rounding), "unresolved" (rounding hides the answer) or "violated"."""
        if self.right.rho is None:
            return "unmoved"
        if not is_zero(self.right.rho, self.right.rho_floor):
            return "violated"
        return "preserved" if self.right.resolved else "unresolved"

    @property
    def preserved_by(self) -> str | None:
        """The condition that explains a preserved V, "response" where none on the factors does; None unless preserved."""
        if self.status != "preserved":
            return None
        if self.kind == "full weight":
            return "displacement"
        held = {name for name, condition in self.conditions.items() if condition.preserved}
        if "state" in held and (self.kind == "zero-output block" or "displacement" in held):
            return "state"
        return "displacement" if {"displacement", "delta_b"} <= held else "response"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that docs/reference.md lists."""
        return {
            "kind": self.kind,
            "status": self.status,
            "preserved_by": self.preserved_by,
            **({} if self.k is None else {"k": self.k, "d": self.d}),
            **_numbers(self.right),
            "conditions": {name: vars(condition) for name, condition in self.conditions.items()},
            "paths": None if self.paths is None else dict(self.paths),
            "left": None if self.left is None else _numbers(self.left),
        }


@dataclass(frozen=True)
class Audited:
    """Readings of every layer and of all layers together."""

    overall: DriftReading  # all layers together
    layers: Mapping[str, DriftReading] = field(repr=False)  # layerChange path -> reading

    @classmethod
    def of(cls, layers: Mapping[str, LayerChange]) -> Audited:
        """Return the readings of layers; over all layers, norms add up in squares."""
        overall = DriftReading.of(sum(layers.values(), LayerChange()))
        return cls(overall, {name: DriftReading.of(layer) for name, layer in layers.items()})


def _ratio(above: float, below: float) -> float | None:
    return math.sqrt(above / below) if below > 0 else None


def _paths(block: Block, core: Subspace) -> Paths:
    start = block.start or block.now.unborn()
    A, B, A0, B0 = (in_float64(x.detach()) for x in (block.now.A, block.now.B, start.A, start.B))
    s = block.now.scale
    return Paths(square_of(s * B0 @ core.coordinates(A - A0)), square_of(s * (B - B0) @ core.coordinates(A)))


def _floor(blocks: Sequence[Block], *, k: int, d: int) -> float:
    """Rounding of several blocks' factors adds up in squares."""
    return math.sqrt(sum(storage_floor(block.now, block.start, k=k, d=d) ** 2 for block in blocks))


def _moves(before: Tensor, after: Tensor):
    for start in range(0, before.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        yield rows, in_float64(after[rows]) - in_float64(before[rows])


def _plus(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other


def _numbers(drift: Drift) -> dict[str, float | None]:
    names = ("d_eff", "d_old", "d_new", "rho", "rho_floor", "chance")
    return {**{name: getattr(drift, name) for name in names}, "bound": None if drift.rho is None else drift.bound}
