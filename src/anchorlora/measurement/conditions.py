"""The conditions of the selection rule, measured on factors   (docs/rule.md).

    displacement  |dA V| / |dA|      state  |A V| / |A|      delta_b  |dB| / |B|

A condition is preserved when it is no larger than rounding explains. One rounding of A leaves unit |A| sqrt(k/d) on V, where unit
is its rms relative error; the tolerance is three times that, and 2 eps |A| for float32. B must be bitwise equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from anchorlora.devices import float64_device, in_float64
from anchorlora.geometry import Factors, Subspace
from anchorlora.measurement.drift import TELLING, Sums, coarsest, rounding

FLOAT32 = torch.finfo(torch.float32).eps


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


def square_of(x: torch.Tensor) -> float:
    """Return the squared norm of a tensor."""
    return float(x.square().sum())


def _ratio(above: float, below: float) -> float | None:
    return math.sqrt(above / below) if below > 0 else None
