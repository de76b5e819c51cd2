"""Runs on a grid of method x order x seed: how many each mean is over, and which are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from anchorlora.pages.labels import order_label, paper_order
from anchorlora_lab.report.records import Run, by_method


@dataclass(frozen=True)
class Grid:
    """Every method over every order and seed that any of the runs has."""

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Grid:
        """Return the grid that some runs span."""
        return cls(tuple(runs))

    @cached_property
    def methods(self) -> list[str]:
        """All methods, in the order of `by_method`."""
        return list(by_method(self.runs))

    @cached_property
    def orders(self) -> list[tuple[str, ...]]:
        """All orders; the paper's come first, in its order."""
        return sorted({run.order for run in self.runs}, key=lambda order: (paper_order(order) or "~", order))

    @cached_property
    def seeds(self) -> list[int]:
        """All seeds, ascending."""
        return sorted({run.seed for run in self.runs})

    @property
    def size(self) -> int:
        """Number of runs that a method has when none is missing."""
        return len(self.orders) * len(self.seeds)

    @property
    def one_order(self) -> bool:
        """Whether there is a single order."""
        return len(self.orders) == 1

    @property
    def is_paper(self) -> bool:
        """Whether the orders are the paper's three."""
        return [paper_order(order) for order in self.orders] == ["order1", "order2", "order3"]

    @cached_property
    def there(self) -> dict[tuple[str, tuple[str, ...], int], Run]:
        """The runs that exist, by method, order, and seed."""
        return {(run.method, run.order, run.seed): run for run in self.runs}

    def of_method(self, method: str) -> list[Run]:
        """Return the runs of a method, by order and seed."""
        return [self.there[key] for key in self._cells(method) if key in self.there]

    @cached_property
    def groups(self) -> list[list[Run]]:
        """The runs of each method."""
        return [self.of_method(method) for method in self.methods]

    def count(self, method: str) -> str:
        """Return how many runs a method has, such as "8 of 9"."""
        return f"{len(self.of_method(method))} of {self.size}"

    @cached_property
    def partial(self) -> frozenset[int]:
        """Row numbers (0-based) of the methods that lack runs."""
        return frozenset(i for i, method in enumerate(self.methods) if len(self.of_method(method)) < self.size)

    @cached_property
    def note(self) -> str:
        """A sentence that names the missing runs, methods with the same gaps together; empty for a complete grid."""
        gaps: dict[str, list[str]] = {}
        for method in self.methods:
            missing = [self._gap(method, order) for order in self.orders]
            if any(missing):
                gaps.setdefault(", ".join(filter(None, missing)), []).append(method)
        if not gaps:
            return ""
        told = "; ".join(f"{', '.join(methods)}: {gap}" for gap, methods in gaps.items())
        return f"Missing runs: {told}. Rows with missing runs are means over the runs that exist; they are not ranked or compared."

    def _gap(self, method: str, order: tuple[str, ...]) -> str:
        seeds = [str(seed) for seed in self.seeds if (method, order, seed) not in self.there]
        return f"{order_label(order)} seed{'s' if len(seeds) > 1 else ''} {' '.join(seeds)}" if seeds else ""

    def _cells(self, method: str) -> list[tuple[str, tuple[str, ...], int]]:
        return [(method, order, seed) for order in self.orders for seed in self.seeds]
