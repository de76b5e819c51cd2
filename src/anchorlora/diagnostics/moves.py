"""How far one optimizer step moved something inside protected directions: |(X - X_pre) V|."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.geometry import Subspace

Read = Callable[[], Tensor]


class StepMoves:
    """The step under way, layer by layer.  X (.., d) is read when asked; each has directions (d, k)."""

    def __init__(self, watched: Mapping[str, tuple[Read, Subspace]]) -> None:
        self.watched = watched
        self.before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Keep what the step starts from."""
        self.before = {name: read().detach().clone() for name, (read, _) in self.watched.items()}

    def inside(self) -> dict[str, float]:
        """The norm of each move inside its directions, in float64."""
        out = {}
        for name, (read, core) in self.watched.items():
            move = in_float64(read().detach()) - in_float64(self.before[name])
            out[name] = float(core.coordinates(move).norm())
        return out


def together(norms: Mapping[str, float]) -> float:
    """The norm of all of them."""
    return math.sqrt(sum(norm**2 for norm in norms.values()))
