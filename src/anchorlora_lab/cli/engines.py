"""Options of the commands that start many runs: which engine carries them out, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from anchorlora_lab.grid.scheduler import Engine

OPTIONS = {  # option -> engines that have it
    "slots": ("local",),
    "partition": ("slurm",),
    "time": ("slurm",),
    "gres": ("slurm",),
    "sbatch": ("slurm",),
    "wait": ("slurm",),
    "per_task": ("slurm",),
    "max_running": ("slurm", "ray"),
}


@dataclass(frozen=True)
class EngineOptions:
    """What a command line says about the engine."""

    engine: str
    slots: int | None
    partition: str | None
    time: str | None
    gres: str | None
    sbatch: tuple[str, ...]
    wait: bool
    per_task: int | None
    max_running: int | None
    retry_failed: bool

    def made(self, device: str) -> Engine:
        """Return the engine, after finding what is wrong with the request; nothing is written."""
        for name, engines in OPTIONS.items():
            if getattr(self, name) and self.engine not in engines:
                raise InvalidValue(
                    f"--{name.replace('_', '-')} is an option of --engine {' or '.join(engines)}, not of {self.engine}"
                )
        if self.engine == "slurm":
            from anchorlora_lab.grid.slurm import SlurmEngine

            named = {"partition": self.partition, "time": self.time, "gres": self.gres}
            options = (*(f"--{name}={value}" for name, value in named.items() if value), *self.sbatch)
            how: dict[str, Any] = {"max_running": self.max_running, "retry_failed": self.retry_failed, "wait": self.wait}
            slurm = SlurmEngine(options, per_task=self.per_task or 1, **how)
            slurm.check()
            return slurm
        if self.engine == "ray":
            from anchorlora_lab.grid.ray import RayEngine

            ray = RayEngine(max_running=self.max_running, retry_failed=self.retry_failed)
            ray.check()
            return ray
        from anchorlora_lab.grid.scheduler import LocalEngine
        from anchorlora_lab.grid.slots import slots_for

        return LocalEngine(slots_for(device, self.slots))

    def at_a_time(self, device: str) -> int:
        """Return how many runs to expect at a time, for --dry-run."""
        from anchorlora_lab.grid.slots import slots_for

        return slots_for(device, self.slots or self.max_running)


def engine_options(command: Callable) -> Callable:
    """Add --engine and what engines need, gathered in one argument `engines`."""

    @click.option(
        "--engine",
        type=click.Choice(["local", "slurm", "ray"]),
        default="local",
        show_default=True,
        help="Where runs are executed: local processes, one Slurm array, or Ray tasks.",
    )
    @click.option(
        "--slots",
        type=click.IntRange(min=1),
        help="local: number of concurrent runs, each on its own GPU if there are enough.  [default: one per GPU, or per CPU core]",
    )
    @click.option("--partition", help="slurm: the partition.")
    @click.option("--time", help="slurm: the time limit of a run; it saves before the limit and is requeued.")
    @click.option("--gres", help="slurm: resources of a run, such as gpu:1.")
    @click.option("--sbatch", multiple=True, metavar="OPTION", help="slurm: any other sbatch option (--sbatch=--account=lab).")
    @click.option("--wait", is_flag=True, help="slurm: wait until the runs have finished, instead of returning after submitting.")
    @click.option(
        "--per-task",
        type=click.IntRange(min=1),
        help="slurm: runs in one array task, one after the other; for many short runs.  [default: 1]",
    )
    @click.option("--max-running", type=click.IntRange(min=1), help="slurm, ray: number of concurrent runs.")
    @click.option("--retry-failed", is_flag=True, help="Also restart runs that have failed; local always does.")
    @wraps(command)
    def gathered(*args: Any, **given: Any) -> Any:
        fields = {name: given.pop(name) for name in EngineOptions.__dataclass_fields__}
        return command(*args, engines=EngineOptions(**fields), **given)

    return gathered
