"""Everything that survives a task boundary, as named tensors: feature rows, cores, and what constraints remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, device

from anchorlora.adapters import NOTHING
from anchorlora.config import Features
from anchorlora.features.store import FeatureStore, LayerCore
from anchorlora.geometry import KEPT, Subspace, in_float32, joined_by_layer
from anchorlora.processes import ALONE, Processes

Provided = Callable[[Mapping[str, Tensor]], dict[str, LayerCore]] | None


@dataclass(eq=False)
class Past:
    """Everything that finished tasks left behind for later ones."""

    settings: Features  # how cores are made
    rows: FeatureStore  # feature rows of all tasks
    tasks: int = 0  # how many are finished
    last: dict[str, LayerCore] = field(default_factory=dict)
    first_cores: dict[str, Subspace] = field(default_factory=dict)  # layer path -> core of the first task alone
    union_cores: dict[str, Subspace] = field(default_factory=dict)
    remembered: Mapping[str, Tensor] = field(default_factory=dict)  # what constraints keep
    given: dict[str, Subspace] = field(default_factory=dict)
    cores: dict[str, Subspace] = field(init=False)
    wides: dict[str, Subspace] = field(init=False)  # layer path -> wide basis for the next task

    def __post_init__(self) -> None:
        self.cores, self.wides = dict(self.given), dict(self.given)
        self.first_cores, self.union_cores = self.first_cores or dict(self.given), self.union_cores or dict(self.given)

    @classmethod
    def empty(
        cls,
        settings: Features,
        *,
        device: device | str = "cpu",
        given: Mapping[str, Subspace] = NOTHING,
        remembered: Mapping[str, Tensor] = NOTHING,
        provided: Provided = None,
    ) -> Past:
        """Return the past before the first task."""
        keep, counted = max(KEPT, settings.wide), provided is not None
        rows = FeatureStore(settings.rows, settings.held_out_rows, spread=False, device=device, keep=keep, passed_over=counted)
        past = cls(settings, rows, given=dict(given), remembered=dict(remembered))
        if remembered and provided is not None:
            cores = provided(remembered)
            past.cores, past.wides = past.protecting(cores), past.protecting(cores, "wide")
            past.first_cores, past.union_cores = dict(past.cores), dict(past.cores)
        return past

    @property
    def held_out(self) -> dict[str, Tensor]:
        """Rows of finished tasks that no core was made from, by layer."""
        return self.rows.held_out_rows(tasks=self.tasks)

    def made(
        self, remembered: Mapping[str, Tensor], processes: Processes = ALONE, *, provided: Provided = None
    ) -> tuple[dict[str, LayerCore], dict[str, Tensor]]:
        """Make the cores of all tasks so far, the one that ends included, once for all processes; `append` takes them."""
        s = self.settings
        memory = processes.told(lambda: dict(remembered))

        def make() -> dict[str, LayerCore]:
            if provided is not None:
                return provided(memory)
            return self.rows.decompose(energy=s.energy, at_least=s.at_least, at_most=s.at_most, wide=s.wide)

        return processes.told(make), memory

    def protecting(self, cores: Mapping[str, LayerCore], kind: str = "core") -> dict[str, Subspace]:
        """Return what protects the next task: the cores, beside what was given before the first task."""
        directions = {layer: getattr(part, kind) for layer, part in cores.items()}
        return in_float32(joined_by_layer(self.given, directions)) if self.given else directions

    def append(self, cores: dict[str, LayerCore], remembered: Mapping[str, Tensor]) -> None:
        """Count a task as finished whose rows are there."""
        self.first_cores = self.first_cores or {layer: part.core for layer, part in cores.items()}
        self.union_cores = joined_by_layer(self.union_cores, {layer: part.core for layer, part in cores.items()})
        self.tasks, self.last, self.remembered = self.tasks + 1, cores, dict(remembered)
        self.cores, self.wides = self.protecting(cores), self.protecting(cores, "wide")
