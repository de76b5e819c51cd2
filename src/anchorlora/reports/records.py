"""Finished runs, found and grouped.  Statistics are over runs: means, and sample standard deviations (ddof 1) with their n."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anchorlora.record import RECORD_FILE, Record, read_record

# what a table may not mix without saying so; a method owns its own definition
SAME = ("recipe", "backbone", "protocol")


@dataclass(frozen=True)
class Run:
    """A record and the directory that it was found in."""

    folder: Path
    record: Record

    @property
    def method(self) -> str:
        return self.record.method

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(self.record.order)


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Every finished run in the folders or below them.  Raises ValueError for a folder without one, or a bad record."""
    runs = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; give run directories, or a folder of them")
        records = sorted(folder.rglob(RECORD_FILE))
        if not records:
            raise ValueError(f"{folder} holds no finished run: no {RECORD_FILE} in it")
        runs += [Run(path.parent, read_record(path)) for path in records]
    unique = {run.folder.resolve(): run for run in runs}
    return list(unique.values())


def mixed(runs: Sequence[Run]) -> list[str]:
    """Fields in which runs of one table differ although they are no axis of it, as "field: value, value"."""
    out = []
    for path in sorted({path for run in runs for path in _leaves(run.record)}):
        values = {str(_leaves(run.record).get(path)) for run in runs}
        if len(values) > 1:
            out.append(f"{path}: {', '.join(sorted(values))}")
    return out


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each method: shared adapters before blocks per task, and within a family from fewer parts to more."""

    def place(run: Run) -> tuple[bool, int, str]:
        return not run.record.definition.startswith("Shared("), run.record.definition.count(" + "), run.method

    out: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (place(run), run.order, run.record.seed)):
        out.setdefault(run.method, []).append(run)
    return out


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)  # exact, so the same in every version of Python


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (ddof 1); None for one value."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def _leaves(record: Record) -> dict[str, object]:
    content = record.model_dump(by_alias=True)
    out: dict[str, object] = {}

    def walk(path: str, value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{path}.{name}", inner)
        else:
            out[path] = value

    for field in SAME:
        walk(field, content[field])
    return {path: value for path, value in out.items() if not path.startswith(("protocol.examples", "protocol.passages_cut"))}
