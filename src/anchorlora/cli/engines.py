"""Options of the commands that start many runs: which engine carries them out, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from anchorlora.study.scheduler import Engine

OPTIONS = {  # option -> engines that have it
    "slots": ("local",),
    "partition": ("slurm",),
    "time": ("slurm",),
    "gres": ("slurm", "script"),
    "sbatch": ("slurm",),
    "wait": ("slurm",),
    "per_task": ("slurm",),
    "max_running": ("slurm", "ray", "script"),
    "script": ("script",),
    "image": ("script",),
    "volume": ("script",),
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
    script: Path | None
    image: str | None
    volume: str | None
    retry_failed: bool

    def made(self, device: str, root: Path) -> Engine:
        """Return the engine, after finding what is wrong with the request; nothing is written.

        Args:
            device: The device of the recipe.
            root: The folder of all runs.

        Raises:
            InvalidValue: An option belongs to another engine, the engine is not there, or it refuses the request.
        """
        for name, engines in OPTIONS.items():
            if getattr(self, name) and self.engine not in engines:
                raise InvalidValue(
                    f"--{name.replace('_', '-')} is an option of --engine {' or '.join(engines)}, not of {self.engine}"
                )
        if self.engine == "slurm":
            from anchorlora.study.slurm import SlurmEngine

            named = {"partition": self.partition, "time": self.time, "gres": self.gres}
            options = (*(f"--{name}={value}" for name, value in named.items() if value), *self.sbatch)
            how: dict[str, Any] = {"max_running": self.max_running, "retry_failed": self.retry_failed, "wait": self.wait}
            slurm = SlurmEngine(options, per_task=self.per_task or 1, **how)
            slurm.check()
            return slurm
        if self.engine == "ray":
            from anchorlora.study.ray import RayEngine

            ray = RayEngine(max_running=self.max_running, retry_failed=self.retry_failed)
            ray.check()
            return ray
        if self.engine == "script":
            from anchorlora.study.script import ScriptEngine

            if self.script is None:
                raise InvalidValue("--engine script needs --script FILE, which ends in .sh or .yaml")
            script = ScriptEngine(
                self.script,
                image=self.image,
                volume=self.volume,
                gpus=_gpus(self.gres),
                max_running=self.max_running,
                retry_failed=self.retry_failed,
            )
            script.check(root)
            return script
        from anchorlora.study.scheduler import LocalEngine
        from anchorlora.study.slots import slots_for

        return LocalEngine(slots_for(device, self.slots))

    def at_a_time(self, device: str) -> int:
        """Return how many runs to expect at a time, for --dry-run.

        Args:
            device: The device of the recipe.
        """
        from anchorlora.study.slots import slots_for

        return slots_for(device, self.slots or self.max_running)


def engine_options(command: Callable) -> Callable:
    """Add --engine and what engines need, gathered in one argument `engines`.

    Args:
        command: A function with the argument engines.
    """

    @click.option(
        "--engine",
        type=click.Choice(["local", "slurm", "ray", "script"]),
        default="local",
        show_default=True,
        help="Where runs are executed: local processes, one Slurm array, Ray tasks, or a script to submit elsewhere.",
    )
    @click.option(
        "--slots",
        type=click.IntRange(min=1),
        help="local: number of concurrent runs, each on its own GPU if there are enough.  [default: one per GPU, or per CPU core]",
    )
    @click.option("--partition", help="slurm: the partition.")
    @click.option("--time", help="slurm: the time limit of a run; it saves before the limit and is requeued.")
    @click.option("--gres", help="slurm: resources of a run, such as gpu:1; script: gpu:N for a Kubernetes Job.")
    @click.option("--sbatch", multiple=True, metavar="OPTION", help="slurm: any other sbatch option (--sbatch=--account=lab).")
    @click.option("--wait", is_flag=True, help="slurm: wait until the runs have finished, instead of returning after submitting.")
    @click.option(
        "--per-task",
        type=click.IntRange(min=1),
        help="slurm: runs in one array task, one after the other; for many short runs.  [default: 1]",
    )
    @click.option("--max-running", type=click.IntRange(min=1), help="slurm, ray, script: number of concurrent runs.")
    @click.option("--script", type=click.Path(path_type=Path), metavar="FILE", help="script: FILE.sh, or FILE.yaml for Kubernetes.")
    @click.option("--image", help="script: the container image of a Kubernetes Job.")
    @click.option(
        "--volume", metavar="CLAIM:PATH", help="script: the volume claim of a Kubernetes Job that holds --out, and its path."
    )
    @click.option("--retry-failed", is_flag=True, help="Also restart runs that have failed; local always does.")
    @wraps(command)
    def gathered(*args: Any, **given: Any) -> Any:
        fields = {name: given.pop(name) for name in EngineOptions.__dataclass_fields__}
        return command(*args, engines=EngineOptions(**fields), **given)

    return gathered


def _gpus(gres: str | None) -> int:
    kind, _, count = (gres or "gpu:0").rpartition(":")
    if kind != "gpu" or not count.isdigit():
        raise InvalidValue(f"--gres {gres}: for a Kubernetes Job, give gpu:N")
    return int(count)
