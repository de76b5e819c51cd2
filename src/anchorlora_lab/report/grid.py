"""Runs on a grid of method x order x seed: how many each mean is over, and which are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, TypeVar

from anchorlora.pages.record import order_label, paper_order
from anchorlora.pages.table import Column, Table, Value
from anchorlora_lab.report.layout import NOTES, value_of
from anchorlora_lab.report.records import Run, by_method, deviation_of, group_by, mean_of


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in method alone."""

    one: Run
    other: Run

    @property
    def name(self) -> str:
        """The pair as "one - other"."""
        return f"{self.one.method} - {self.other.method}"

    def change(self, name: str) -> float | None:
        """Return the score of `one` minus the score of `other`, in percentage points; None if either is undefined."""
        value, other = value_of(self.one, name), value_of(self.other, name)
        return None if value is None or other is None else value - other


@dataclass(frozen=True)
class Grid:
    """Every method over every order and seed that any of the runs has."""

    runs: Sequence[Run]

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
        """True if there is a single order."""
        return len(self.orders) == 1

    @property
    def is_paper(self) -> bool:
        """True if the orders are the paper's three."""
        return [paper_order(order) for order in self.orders] == ["order1", "order2", "order3"]

    @cached_property
    def there(self) -> dict[tuple[str, tuple[str, ...], int], Run]:
        """The runs that exist, by method, order, and seed."""
        return {(run.method, run.order, run.seed): run for run in self.runs}

    def of_method(self, method: str) -> list[Run]:
        """Return the runs of a method, by order and seed."""
        known = (self.there.get((method, *where)) for where in product(self.orders, self.seeds))
        return [run for run in known if run]

    @cached_property
    def groups(self) -> list[list[Run]]:
        """The runs of each method."""
        return [self.of_method(method) for method in self.methods]

    def pairs(self, one: str, other: str) -> list[Pair]:
        """Return the runs of two methods at the same order and seed."""
        both = [(self.there.get((one, *where)), self.there.get((other, *where))) for where in product(self.orders, self.seeds)]
        return [Pair(first, second) for first, second in both if first and second]

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
        gaps = group_by(self.methods, lambda method: ", ".join(filter(None, (self._gap(method, order) for order in self.orders))))
        text = "; ".join(f"{', '.join(methods)}: {gap}" for gap, methods in gaps.items() if gap)
        if not text:
            return ""
        return f"Missing runs: {text}. Rows with missing runs are means over the runs that exist; they are not ranked or compared."

    def _gap(self, method: str, order: tuple[str, ...]) -> str:
        seeds = [str(seed) for seed in self.seeds if (method, order, seed) not in self.there]
        return f"{order_label(order)} seed{'s' if len(seeds) > 1 else ''} {' '.join(seeds)}" if seeds else ""


Group = TypeVar("Group")
Digits = int | Literal["e", "g"]
Measure = tuple[Column, Callable[[Sequence[Run]], Value]]
METHOD: Measure = (Column("method"), lambda runs: runs[0].method)
ORDER: Measure = (Column("order"), lambda runs: order_label(runs[0].order))
SEED: Measure = (Column("seed"), lambda runs: runs[0].seed)
N: Measure = (Column("n"), len)


def pivot(
    name: str,
    title: str,
    groups: Iterable[Group],
    measures: Sequence[tuple[Column, Callable[[Group], Value]]],
    note: str | None = None,
    partial: frozenset[int] = frozenset(),
) -> Table:
    """Every measure of every group, with the table's own note by default."""
    rows = tuple(tuple(of(group) for _, of in measures) for group in groups)
    note = NOTES[name] if note is None else note
    return Table(name, title, tuple(column for column, _ in measures), rows, note, partial)


def by_methods(name: str, title: str, grid: Grid, measures: Sequence[Measure], note: str | None = None) -> Table:
    """Every measure of the runs of every method; methods that lack runs are neither ranked nor compared."""
    runs: Measure = (Column("runs"), lambda of_method: grid.count(of_method[0].method))
    return pivot(name, title, grid.groups, [METHOD, runs, *measures], note, grid.partial).noting(grid.note)


def average(value: Callable[[Run], float | None]) -> Callable[[Sequence[Run]], float | None]:
    """The mean of a value over the members of a group that have it."""
    return lambda group: mean_of(map(value, group))


def spread(value: Callable[[Run], float | None]) -> Callable[[Sequence[Run]], float | None]:
    """The sample standard deviation of a value over the members of a group that have it."""
    return lambda group: deviation_of(map(value, group))


def means(values: Mapping[str, Callable[[Run], float | None]], digits: Digits = 2) -> list[Measure]:
    """A column of means for each value, by its heading."""
    return [(Column(heading, digits), average(value)) for heading, value in values.items()]
