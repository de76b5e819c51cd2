"""A table as a pivot: one row a group of runs or pairs, one column a measure of the group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from anchorlora.pages.labels import order_label
from anchorlora.pages.table import Column, Table, Value
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.records import Run, deviation_of, mean_of

T = TypeVar("T")
Digits = int | Literal["e", "g"]
Measure = tuple[Column, Callable[[Sequence[T]], Value]]
METHOD: Measure[Run] = (Column("method"), lambda runs: runs[0].method)
ORDER: Measure[Run] = (Column("order"), lambda runs: order_label(runs[0].order))
SEED: Measure[Run] = (Column("seed"), lambda runs: runs[0].seed)
N: Measure[Run] = (Column("n"), len)


def pivot(
    name: str,
    title: str,
    groups: Iterable[Sequence[T]],
    measures: Sequence[Measure[T]],
    note: str = "",
    partial: frozenset[int] = frozenset(),
) -> Table:
    """Every measure of every group."""
    rows = tuple(tuple(of(group) for _, of in measures) for group in groups)
    return Table(name, title, tuple(column for column, _ in measures), rows, note, partial)


def by_methods(name: str, title: str, grid: Grid, measures: Sequence[Measure[Run]], note: str = "") -> Table:
    """Every measure of the runs of every method; methods that lack runs are neither ranked nor compared."""
    runs: Measure[Run] = (Column("runs"), lambda of_method: grid.count(of_method[0].method))
    groups = map(grid.of_method, grid.methods)
    return pivot(name, title, groups, [METHOD, runs, *measures], note, grid.partial).noting(grid.note)


def by_run(name: str, title: str, grid: Grid, measures: Sequence[Measure[Run]], note: str = "") -> Table:
    """Every measure of every run."""
    groups = [[run] for method in grid.methods for run in grid.of_method(method)]
    return pivot(name, title, groups, [METHOD, ORDER, SEED, *measures], note)


def average(value: Callable[[T], float | None]) -> Callable[[Sequence[T]], float | None]:
    """The mean of a value over the members of a group that have it."""
    return lambda group: mean_of(map(value, group))


def spread(value: Callable[[T], float | None]) -> Callable[[Sequence[T]], float | None]:
    """The sample standard deviation of a value over the members of a group that have it."""
    return lambda group: deviation_of(map(value, group))


def means(values: Mapping[str, Callable[[T], float | None]], digits: Digits = 2) -> list[Measure[T]]:
    """A column of means for each value, by its heading."""
    return [(Column(heading, digits), average(value)) for heading, value in values.items()]
