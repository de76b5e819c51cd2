"""Everything that survives a task boundary, as named tensors: feature rows, cores, and what constraints remember."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from anchorlora.continual.recipe import Features
from anchorlora.features import LayerCore, RowStore
from anchorlora.geometry import Subspace


@dataclass(eq=False)
class Past:
    """What finished tasks left for later ones."""

    settings: Features
    rows: RowStore
    boundaries: list[dict[str, LayerCore]] = field(default_factory=list)  # cores made at the end of task 1, 2, ..
    remembered: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, settings: Features) -> Past:
        return cls(settings, RowStore(limit=settings.rows, held_out=settings.held_out_rows))

    @property
    def tasks(self) -> int:
        """How many tasks are finished."""
        return len(self.boundaries)

    @property
    def cores(self) -> dict[str, Subspace]:
        """The cores that protect the next task, by layer; empty before the first boundary."""
        return {layer: part.core for layer, part in self.boundaries[-1].items()} if self.boundaries else {}

    @property
    def wides(self) -> dict[str, Subspace]:
        return {layer: part.wide for layer, part in self.boundaries[-1].items()} if self.boundaries else {}

    @property
    def first_cores(self) -> dict[str, Subspace]:
        """The cores of the first task alone."""
        return {layer: part.core for layer, part in self.boundaries[0].items()}

    @property
    def union_cores(self) -> dict[str, Subspace]:
        """One orthonormal basis for all past cores of a layer."""
        joined: dict[tuple[int, ...], Subspace] = {}  # layers of one store share their cores, so they share the union
        out = {}
        for layer in self.boundaries[-1]:
            parts = [boundary[layer].core for boundary in self.boundaries]
            key = tuple(id(part) for part in parts)
            if key not in joined:
                joined[key] = Subspace.joining(parts)
            out[layer] = joined[key]
        return out

    @property
    def held_out(self) -> dict[str, Tensor]:
        """Rows of finished tasks that no core was made from, by layer."""
        return self.rows.held_out_rows(tasks=self.tasks)

    def boundary(self, remembered: Mapping[str, Tensor]) -> dict[str, LayerCore]:
        """A task has ended: make the cores of all rows so far."""
        s = self.settings
        cores = self.rows.decompose(energy=s.energy, at_least=s.at_least, at_most=s.at_most, wide=s.wide)
        self.boundaries.append(cores)
        self.remembered = dict(remembered)
        return cores
