"""Finished runs, found and ordered.  Statistics are over runs: means, and sample standard deviations (ddof 1) with their n."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anchorlora.errors import InvalidValue
from anchorlora.schemas.eval import EVAL_FILE, Evaluation, read_evaluation
from anchorlora.schemas.record import RECORD_FILE, SEAL_FILE, Record
from anchorlora.schemas.run_folder import TRACE_FILE, adapter_sha256, read_run, refuse_lost_record
from anchorlora.schemas.trace import Point, read_trace

Family = Literal["shared", "cumulative"]
FAMILIES: dict[Family, str] = {"shared": "shared adapter", "cumulative": "a block per task"}  # as words


@dataclass(frozen=True)
class Run:
    """A record, the directory that it was found in, and what lies beside it."""

    folder: Path
    record: Record
    general: Evaluation | None = None
    trace: tuple[Point, ...] = ()  # of a two-task mechanism trace; empty for a sequence

    @property
    def method(self) -> str:
        return self.record.method

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(self.record.order)

    @property
    def seed(self) -> int:
        return self.record.seed

    @property
    def family(self) -> Family:
        return "shared" if self.record.definition.split("(")[0].strip() == "Shared" else "cumulative"

    def steps(self, task: str) -> int | None:
        """Optimizer steps of a task; None where the protocol does not tell."""
        protocol: Any = self.record.protocol
        try:
            examples, training = protocol["examples"][task]["train"], protocol["training"]
            epochs, window = training["epochs"], training["window"]
        except (KeyError, TypeError):
            return None
        return epochs * -(-examples // window) if all(type(n) is int and n > 0 for n in (examples, epochs, window)) else None

    @property
    def task1_state(self) -> str | None:
        """The state that a mechanism trace starts from; None where the protocol names none."""
        named = self.record.protocol.get("task1_state")
        return named if isinstance(named, str) else None

    @property
    def energy_asked(self) -> float | None:
        """The share of energy that cores are to retain; None where the protocol does not tell."""
        features: Any = self.record.protocol.get("features")
        share = features.get("energy") if isinstance(features, dict) else None
        return share if isinstance(share, float) and 0 <= share <= 1 else None


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """Every finished run in the folders or below them.  Raises ValueError for a folder without one, and for an altered one."""
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InvalidValue(f"{folder} is no folder; give run directories, or a folder of them")
        for seal in folder.rglob(SEAL_FILE):
            refuse_lost_record(seal.parent.parent)
        records = sorted(folder.rglob(RECORD_FILE))
        if not records:
            raise InvalidValue(f"{folder} holds no finished run: no {RECORD_FILE} in it")
        for path in records:
            if path.parent.resolve() not in found:
                found[path.parent.resolve()] = _read(path.parent)
    return list(found.values())


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each method: shared adapters before blocks per task, and within a family from fewer parts to more."""

    def place(run: Run) -> tuple[int, int, str]:
        return list(FAMILIES).index(run.family), run.record.definition.count(" + "), run.method

    out: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (place(run), run.order, run.seed)):
        out.setdefault(run.method, []).append(run)
    return out


def families_of(runs: Sequence[Run]) -> dict[Family, list[Run]]:
    """The families that have runs."""
    return {family: mine for family in FAMILIES if (mine := [run for run in runs if run.family == family])}


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)  # exact, so the same in every version of Python


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are defined; None if none is."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation (ddof 1); None for one value."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def deviation_of(values: Iterable[float | None]) -> float | None:
    """The sample standard deviation of the values that are defined."""
    return deviation([value for value in values if value is not None])


def _read(folder: Path) -> Run:
    bare = Run(folder, read_run(folder))
    path = folder / TRACE_FILE
    traced = path.exists() and len(bare.order) == 2 and bare.task1_state is not None
    points = read_trace(path, steps=bare.steps(bare.order[1])) if traced else ()
    return Run(folder, bare.record, _general(bare), points)


def _general(run: Run) -> Evaluation | None:
    """What was measured of the run's last adapter.  Raises ValueError where it was another one."""
    path, adapter = run.folder / EVAL_FILE, run.folder / f"tasks/{len(run.order)}-{run.order[-1]}/adapter"
    found = read_evaluation(path) if path.exists() else None
    if found and adapter.is_dir() and found.adapter_sha256 != adapter_sha256(adapter):
        raise InvalidValue(f"{path} was measured with another adapter than {adapter}; measure it again: anchorlora eval --force")
    return found
