"""Runs that belong together: sequences of one recipe, backbone, set of tasks; traces of one recipe, backbone, order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from anchorlora.reports.agreement import refuse_other_starts, refuse_unlike
from anchorlora.reports.names import file_name
from anchorlora.reports.orders import tasks_in
from anchorlora.reports.records import Run

Kind = Literal["sequence", "trace"]
Key = tuple[Kind, str, str, tuple[str, ...]]  # with recipe, backbone and tasks


@dataclass(frozen=True)
class Study:
    """Runs whose cells may stand in one table.  prefix: what its files are called by, where there are several studies of a kind."""

    kind: Kind
    runs: tuple[Run, ...]
    prefix: str = ""

    @property
    def title(self) -> str:
        first = self.runs[0].record
        return f"{first.recipe} on {first.backbone.name}"


def studies_of(runs: Sequence[Run]) -> list[Study]:
    """The studies, sequences first.  Raises ValueError for a cell that is there twice, and for cells that may not differ and do."""
    groups: dict[Key, list[Run]] = {}
    for run in _without_starts(runs):
        kind: Kind = "trace" if run.trace else "sequence"
        tasks = run.order if run.trace else tuple(sorted(run.order))
        groups.setdefault((kind, run.record.recipe, run.record.backbone.name, tasks), []).append(run)
    for (kind, *_), mine in groups.items():
        _refuse_twice(mine)
        refuse_unlike(mine)
        if kind == "trace":
            refuse_other_starts(mine)
    return [Study(key[0], tuple(groups[key]), _prefix(key, list(groups))) for key in sorted(groups)]


def _without_starts(runs: Sequence[Run]) -> list[Run]:
    """The runs less those of one task that only made the state which traces start from."""
    begun = {run.task1_state for run in runs if run.trace}
    return [run for run in runs if len(run.order) > 1 or run.task1_state not in begun]


def _refuse_twice(runs: Sequence[Run]) -> None:
    seen: dict[tuple[str, tuple[str, ...], int], Run] = {}
    for run in runs:
        other = seen.setdefault((run.method, run.order, run.seed), run)
        if other is not run:
            cell = f"{run.method}, {tasks_in(run.order)}, seed {run.seed}"
            raise ValueError(f"{other.folder} and {run.folder} are the same cell ({cell}); give only one of them")


def _prefix(key: Key, keys: Sequence[Key]) -> str:
    """recipe-backbone-, with a number where that is not enough; nothing for the only study of its kind."""
    kind, recipe, backbone, _ = key
    alike = [k for k in keys if k[0] == kind]
    if len(alike) == 1:
        return ""
    again = [k for k in alike if file_name(f"{k[1]}-{k[2]}") == file_name(f"{recipe}-{backbone}")]
    number = f"-{sorted(again).index(key) + 1}" if len(again) > 1 else ""
    return file_name(f"{recipe}-{backbone}"[:60] + number) + "-"
