"""Options of the commands that start many runs: the recipe, which engine carries them out, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anchorlora.cli.options import ExecutionOptions, execution_options, recipe_options
from anchorlora.errors import InvalidValue
from anchorlora.recipes import protocol

if TYPE_CHECKING:
    from anchorlora.config import Recipe, RunConfig
    from anchorlora_lab.grid.scheduler import Engine

ENGINE = "Where runs are executed: local processes, one Slurm array, or Ray tasks."
SLOTS = "local: number of concurrent runs, each on its own GPU if there are enough.  [default: one per GPU, or per CPU core]"
SBATCH = "slurm: any other sbatch option (--sbatch=--account=lab)."
WAIT = "slurm: wait until the runs have finished, instead of returning after submitting."
PER_TASK = "slurm: runs in one array task, one after the other; for many short runs.  [default: 1]"
RETRY = "Also restart runs that have failed; local always does."
AT_LEAST_1 = click.IntRange(min=1)
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # option -> engines that have it, and how click reads it
    "slots": (("local",), {"type": AT_LEAST_1, "help": SLOTS}),
    "partition": (("slurm",), {"help": "slurm: the partition."}),
    "time": (("slurm",), {"help": "slurm: the time limit of a run; it saves before the limit and is requeued."}),
    "gres": (("slurm",), {"help": "slurm: resources of a run, such as gpu:1."}),
    "sbatch": (("slurm",), {"multiple": True, "metavar": "OPTION", "help": SBATCH}),
    "wait": (("slurm",), {"is_flag": True, "help": WAIT}),
    "per_task": (("slurm",), {"type": AT_LEAST_1, "help": PER_TASK}),
    "max_running": (("slurm", "ray"), {"type": AT_LEAST_1, "help": "slurm, ray: number of concurrent runs."}),
}

seeds = click.option("--seeds", default=",".join(map(str, protocol.SEEDS)), show_default=True, help="Comma-separated seeds.")


def split_list(text: str) -> list[str]:
    """Return the words of a comma list, each once."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise InvalidValue(f"an empty list: {text!r}; give names separated by commas")
    return words


def seeds_of(text: str) -> list[int]:
    """Return the seeds of a comma list."""
    try:
        return [int(word) for word in split_list(text)]
    except ValueError:
        raise InvalidValue(f"--seeds takes whole numbers separated by commas, not {text!r}") from None


@dataclass(frozen=True)
class StudyRequest:
    """Request of a command line: a recipe, the folder of its runs, and how and by which engine they are executed."""

    recipe: Recipe
    numbers: dict[str, float]  # of methods' parts
    to: Path  # the folder of all runs
    execution: ExecutionOptions
    engine_name: str
    retry_failed: bool
    asked: Mapping[str, Any]  # each of OPTIONS

    def engine(self) -> Engine:
        """Return the engine, after finding what is wrong with the request; nothing is written."""
        for name, (engines, _) in OPTIONS.items():
            if self.asked[name] and self.engine_name not in engines:
                option, known = f"--{name.replace('_', '-')}", " or ".join(engines)
                raise InvalidValue(f"{option} is an option of --engine {known}, not of {self.engine_name}")
        asked, both = self.asked, {"max_running": self.asked["max_running"], "retry_failed": self.retry_failed}
        if self.engine_name == "slurm":
            from anchorlora_lab.grid.slurm import SlurmEngine

            named = [f"--{name}={asked[name]}" for name in ("partition", "time", "gres") if asked[name]]
            slurm = SlurmEngine((*named, *asked["sbatch"]), per_task=asked["per_task"] or 1, wait=asked["wait"], **both)
            slurm.check()
            return slurm
        if self.engine_name == "ray":
            from anchorlora_lab.grid.ray import RayEngine

            ray = RayEngine(**both)
            ray.check()
            return ray
        from anchorlora_lab.grid.scheduler import LocalEngine
        from anchorlora_lab.grid.slots import slots_for

        return LocalEngine(slots_for(self.recipe.base_model.device, asked["slots"]))

    def at_a_time(self) -> int:
        """Return how many runs to expect at a time, for --dry-run."""
        from anchorlora_lab.grid.slots import slots_for

        return slots_for(self.recipe.base_model.device, self.asked["slots"] or self.asked["max_running"])

    def command(self, folder: Path, config: RunConfig) -> list[str]:
        """Return the command that fills a run directory, with the options of execution."""
        from anchorlora_lab.grid.scheduler import command_line

        return [*command_line(folder, config), *self.execution.words()]


def study_options(command: Callable) -> Callable:
    """Add the options of engines, of recipes and of execution, gathered with the recipe and --out in the argument `study`."""

    @recipe_options
    @execution_options
    @wraps(command)
    def gathered(*, engine: str, retry_failed: bool, recipe: str, settings, model, data, to, execution, **given: Any) -> Any:
        from anchorlora.cli.parsing import recipe_of_options

        asked = {name: given.pop(name) for name in OPTIONS}
        chosen, _, numbers = recipe_of_options(recipe, settings, model, data)
        return command(study=StudyRequest(chosen, numbers, to, execution, engine, retry_failed, asked), **given)

    gathered = click.option("--retry-failed", is_flag=True, help=RETRY)(gathered)
    for name, (_, how) in reversed(OPTIONS.items()):
        gathered = click.option(f"--{name.replace('_', '-')}", **how)(gathered)
    kinds = click.Choice(["local", "slurm", "ray"])
    return click.option("--engine", type=kinds, default="local", show_default=True, help=ENGINE)(gathered)
