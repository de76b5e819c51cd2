"""Cells that another runner works at, on this machine or another: which of them are worked at still, and which were left behind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anchorlora.experiments.directory import RunDirectory
from anchorlora.experiments.lease import POLL, Lease

if TYPE_CHECKING:
    from anchorlora.experiments.cells import Planned

HERE = ".cells"  # leases of runners, and what the processes said, beside the run directories


def said_by(planned: Planned, root: Path) -> Path:
    """What the process of a cell prints goes there."""
    return root / HERE / f"{_name(planned, root)}.txt"


def runners_lease(planned: Planned, root: Path) -> Lease:
    """Held by a runner from before it starts the cell's process until that has ended."""
    return Lease(root / HERE / f"{_name(planned, root)}.lease")


def own_lease(planned: Planned) -> Lease:
    """Held by the cell's process itself, should its runner die."""
    return Lease(RunDirectory(planned.folder).lease)


def left_behind(taken: Sequence[Planned], root: Path) -> tuple[list[Planned], list[Planned]]:
    """(those that nobody works at any more, those that somebody does), after a sign of life, or when a lease has run out."""
    free: list[Planned] = []
    alive: list[Planned] = []
    unknown = [(each, (runners_lease(each, root), own_lease(each))) for each in taken]
    while unknown:
        for each, leases in list(unknown):
            if each.done or all(_is_free(lease) for lease in leases):
                free.append(each)
            elif any(lease.alive() for lease in leases):
                alive.append(each)
        unknown = [(each, leases) for each, leases in unknown if each not in free and each not in alive]
        time.sleep(POLL if unknown else 0)
    return free, alive


def _is_free(lease: Lease) -> bool:
    """Whether it can be taken; it is given back at once."""
    with lease:
        return not lease.file.parent.exists() or lease.try_take()


def _name(planned: Planned, root: Path) -> str:
    return "-".join(planned.folder.relative_to(root).parts)
