"""Room of a layer input: cores of several things joined, and cut by energy where too little would be left to learn in.

    J    (d, k)  joined core             T  (k, k)  orthogonal: the columns of J T are directions, each with its energy
    e_i  (k,)    shares of the energy of thing i on the columns of J T, from its own core; on all other directions, nothing is known

A core of up to d / 2 directions is the sum of its parts, unchanged. A larger one is cut: the thing that holds the smallest part of
what it needs takes its strongest direction next, until each holds what it needs or d / 2 directions are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
from anchorlora.geometry.subspace import Subspace

LEAST = 0.4  # of what a thing needs: a joined core that holds less of it is full


@dataclass(frozen=True, eq=False)
class JoinedCore:
    """The joined core of several things at one layer input, and the energy that each of them has on its directions: `core` (d, k),
    `turn` (k, k).
    """

    core: Subspace  # protected subspace (d, k)
    energy: Mapping[str, Tensor]  # name of a thing -> share of its energy on each column of `core.basis @ turn`, (k,)
    turn: Tensor | None = None  # orthogonal (k, k); None for the identity
    whole: Mapping[str, float] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """Most directions that may be protected: half of them stay free to learn in."""
        return max(1, self.core.d // 2)

    @property
    def room(self) -> int:
        """Number of things like these that can be added before a cut."""
        return max(0, self.limit - self.core.k) * len(self.energy) // self.core.k

    def held(self, name: str) -> float:
        """Return the share of a thing's energy that the core holds, at least."""
        return float(self.energy[name].sum())

    def before_cuts(self, name: str) -> float:
        """Return the share of a thing's energy that its own core holds."""
        return self.whole.get(name, self.held(name))

    def directions(self) -> Tensor:
        """Return the directions that `energy` counts, (d, k) in float64."""
        basis = in_float64(self.core.basis)
        return basis if self.turn is None else basis @ in_float64(self.turn)

    def joined(self, other: JoinedCore, *, asked: float = 1.0) -> JoinedCore:
        """Return the joined core of both, cut to `limit` directions where it has more."""
        core, k, V = self.core.joined(other.core), self.core.k, other.directions()
        new = core.basis[:, k:].T @ V
        _, R = torch.linalg.eigh((new * sum(in_float64(e) for e in other.energy.values())) @ new.T)
        turn = torch.block_diag(torch.eye(k).to(R) if self.turn is None else in_float64(self.turn), R.flip(1))
        overlap = ((core.basis @ turn).T @ V) ** 2  # (k, k of the other)
        energy = {name: torch.cat([in_float64(e), R.new_zeros(core.k - k)]) for name, e in self.energy.items()}
        energy |= {name: overlap @ in_float64(e) for name, e in other.energy.items()}
        whole = {name: room.before_cuts(name) for room in (self, other) for name in room.energy}
        return JoinedCore(core, energy, turn, whole).cut(asked=asked)

    def cut(self, *, asked: float = 1.0) -> JoinedCore:
        """Return the core cut to `limit` directions; this one if it has no more."""
        if self.core.k <= self.limit:
            return self
        E = torch.stack([in_float64(e) for e in self.energy.values()])  # (things, k)
        need = E.sum(dim=1).clamp(max=asked)
        held, free = torch.zeros_like(need), E.clone()
        taken: list[int] = []
        while len(taken) < self.limit and bool((held < need - 1e-12).any()):
            poorest = int((held / need.clamp(min=1e-12)).argmin())
            best = int(free[poorest].argmax())
            if float(free[poorest, best]) <= 0:
                need[poorest] = held[poorest]  # it has nothing left to take
                held[poorest] += 1e-12
                continue
            taken.append(best)
            held += E[:, best]
            free[:, best] = -1
        taken.sort()
        whole = {name: self.before_cuts(name) for name in self.energy}
        energy = {name: e[taken] for name, e in self.energy.items()}
        return JoinedCore(Subspace(self.directions()[:, taken].contiguous()), energy, None, whole)

    def refuse_full(self, layer: str) -> None:
        """Refuse a core that had to give up too much of something."""
        for name in self.energy:
            share = self.held(name) / max(self.before_cuts(name), 1e-12)
            if share < LEAST:
                raise InvalidValue(
                    f"{layer} is full: {self.core.k} of its {self.core.d} input directions are protected, half stay free to learn "
                    f"in, and only {100 * share:.0f} % of the energy that {name} had there would be kept; keep fewer things or "
                    "fewer directions of each (--set at_most=N), or go on with --method fold-64, --adapter and --keep FILE "
                    "instead of --after"
                )


def joined_within(union: Mapping[str, JoinedCore], cores: Mapping[str, JoinedCore], *, asked: float = 1.0) -> dict[str, JoinedCore]:
    """Return each layer's joined core with a new one; layers that share a core share the result."""
    made: dict[tuple[int, int], JoinedCore] = {}
    for layer, core in cores.items():
        before = union.get(layer)
        key = (id(before), id(core))
        if key not in made:
            made[key] = before.joined(core, asked=asked) if before else _alone(core).cut(asked=asked)
    return {layer: made[id(union.get(layer)), id(core)] for layer, core in cores.items()}


def _alone(core: JoinedCore) -> JoinedCore:
    """The same in the basis that a first core is joined in."""
    basis = Subspace.joining([core.core])
    return JoinedCore(basis, core.energy, basis.basis.T @ core.directions().to(basis.basis.device), core.whole)
