"""How a report lays out its scores: the columns, the groups of rows, the method that others are compared with, and the spread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from typing import Literal, get_args

from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.pages.table import Column
from anchorlora_lab.report.records import Run, mean_of

Spread = Literal["none", "sd", "interval"]
COLUMNS: Mapping[str, Column] = {  # what stands in a table of scores, besides the tasks
    "AA": Column("AA", better="higher"),
    "LA": Column("LA", better="higher"),
    "BWT": Column("BWT", better="higher"),
    "FM": Column("FM", better="lower"),
    "rho": Column("rho", "e"),
    "seconds": Column("seconds", 1),
    "MB": Column("MB", 0),
}
WORDS: dict[str, dict[str, str]] = json.loads((files("anchorlora_lab.report") / "words.json").read_text(encoding="utf-8"))
NOTES = WORDS["notes"]  # of tables by their names, and of columns that no other sentence explains


@dataclass(frozen=True)
class Layout:
    """How the tables of scores are laid out, in all forms alike. Without a value, each of them is as the study's grid has it.

    Args:
        columns: The columns of the main table, in this order: AA, LA, BWT, FM, rho, seconds, MB, or tasks (accuracy at the end).
        groups: Heading -> methods: the rows, in this order. Methods in no group come after them.
        reference: The method that all others are compared with: in columns of paired differences, the tests, and the first figure.
        spread: What stands next to a mean: "none", "sd" (the sample standard deviation over runs), or "interval" (of 95 %).

    Example:
        >>> from anchorlora_lab.report.layout import Layout
        >>> Layout(columns=("AA", "news"), groups={"Ours": ("mine",)}, reference="ewc", spread="sd").reference
        'ewc'
    """

    columns: tuple[str, ...] = ()
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reference: str | None = None
    spread: Spread | None = None

    def refuse_unknown(self, runs: Sequence[Run]) -> None:
        """Refuse a column, a method or a spread that these runs do not have.

        Args:
            runs: All runs of the report.

        Raises:
            UnknownName: Nothing has this name; the message has the nearest one.
            InvalidValue: A method stands in two groups.
        """
        methods, tasks = {run.method for run in runs}, dict.fromkeys(task for run in runs for task in run.order)
        grouped = [method for methods in self.groups.values() for method in methods]
        _refuse_unknown("column", self.columns, [*COLUMNS, *tasks])
        _refuse_unknown("method in these runs", [*grouped, *filter(None, [self.reference])], sorted(methods))
        _refuse_unknown("spread", filter(None, [self.spread]), get_args(Spread))
        twice = next((method for method in grouped if grouped.count(method) > 1), None)
        if twice is not None:
            raise InvalidValue(f"the method {twice!r} stands in two groups; name it in one")


AS_IS = Layout()


def _refuse_unknown(kind: str, asked: Iterable[str], known: Sequence[str]) -> None:
    for name in asked:
        if name not in known:
            folded = {n.casefold(): n for n in known}
            near = [folded[match] for match in get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)]
            there = f"nearest: {near[0]}" if near else f"there are {', '.join(known)}"
            raise UnknownName(f"no {kind} called {name!r:.80}; {there}")


def value_of(run: Run, name: str) -> float | None:
    """Return what a run has in a column; None where it is undefined, or the run has no such task.

    Args:
        run: A finished run.
        name: A column: of COLUMNS, or a task.
    """
    if name == "rho":
        return mean_of(drift.rho for drift in run.record.drift)
    if name == "seconds":
        return sum(run.record.cost.train_seconds)
    if name == "MB":
        return run.record.cost.peak_memory_bytes / 1e6
    if name in COLUMNS:
        return getattr(run.record.scores, name)
    return run.record.accuracy[-1][run.order.index(name)] if name in run.order else None
