"""Which cells (method x order x seed) a mean has, of how many, and which are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from anchorlora.reports.labels import order_label, paper_order
from anchorlora.reports.records import Run, by_method


@dataclass(frozen=True)
class Grid:
    """Every method over every order and seed that any of the runs has."""

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Grid:
        return cls(tuple(runs))

    @cached_property
    def methods(self) -> list[str]:
        return list(by_method(self.runs))

    @cached_property
    def orders(self) -> list[tuple[str, ...]]:
        """The paper's orders first, in its order."""
        return sorted({run.order for run in self.runs}, key=lambda order: (paper_order(order) or "~", order))

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    @property
    def size(self) -> int:
        """Cells that a method has when none is missing."""
        return len(self.orders) * len(self.seeds)

    @property
    def one_order(self) -> bool:
        return len(self.orders) == 1

    @property
    def is_paper(self) -> bool:
        """Whether the orders are the paper's three."""
        return [paper_order(order) for order in self.orders] == ["order1", "order2", "order3"]

    @cached_property
    def there(self) -> dict[tuple[str, tuple[str, ...], int], Run]:
        return {(run.method, run.order, run.seed): run for run in self.runs}

    def of_method(self, method: str) -> list[Run]:
        return [self.there[key] for key in self._cells(method) if key in self.there]

    def count(self, method: str) -> str:
        """Such as "8 of 9"."""
        return f"{len(self.of_method(method))} of {self.size}"

    @cached_property
    def partial(self) -> frozenset[int]:
        """Places of the methods that lack cells."""
        return frozenset(i for i, method in enumerate(self.methods) if len(self.of_method(method)) < self.size)

    @cached_property
    def note(self) -> str:
        """What is missing, methods with the same gaps together; empty for a whole grid."""
        gaps: dict[str, list[str]] = {}
        for method in self.methods:
            missing = [self._gap(method, order) for order in self.orders]
            if any(missing):
                gaps.setdefault(", ".join(filter(None, missing)), []).append(method)
        if not gaps:
            return ""
        told = "; ".join(f"{', '.join(methods)}: {gap}" for gap, methods in gaps.items())
        return f"Missing cells: {told}. Rows that lack cells are means over those that are there; they are not ranked or compared."

    def _gap(self, method: str, order: tuple[str, ...]) -> str:
        seeds = [str(seed) for seed in self.seeds if (method, order, seed) not in self.there]
        return f"{order_label(order)} seed{'s' if len(seeds) > 1 else ''} {' '.join(seeds)}" if seeds else ""

    def _cells(self, method: str) -> list[tuple[str, tuple[str, ...], int]]:
        return [(method, order, seed) for order in self.orders for seed in self.seeds]
