"""Options shared by the commands that start runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial, wraps
from typing import Any

import click
from click.shell_completion import CompletionItem

from anchorlora.cli.console import count_option
from anchorlora.config import ALL_LINEAR, FOREIGN, Adapter, Training
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.recipes import RECIPES, protocol


def methods_beginning(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Complete the name of a method on the command line."""
    from anchorlora.methods import METHODS

    return [name for name in METHODS if name.startswith(begun)]


def recipes_beginning(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a recipe on the command line, or of a file."""
    return [CompletionItem(name) for name in RECIPES if name.startswith(begun)] or [CompletionItem(begun, type="file")]


class ReadsRows(click.Command):
    """A command that reads rows, whose help lists their forms in place of FORMS. Options are shown in groups, those without one
    last.
    """

    groups: Mapping[str, Sequence[str]] = {}  # heading -> names of options

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, group by group."""
        options = (parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option))
        records = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        grouped = {name for names in self.groups.values() for name in names}
        last = {"Output" if self.groups else "Options": [name for name in records if name not in grouped]}
        for heading, names in (*self.groups.items(), *last.items()):
            with formatter.section(heading):
                formatter.write_dl([records[name] for name in names if name in records])

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help."""
        from anchorlora.data.forms import known_forms

        command = copy(self)
        command.params = [copy(parameter) for parameter in self.params]
        parts: list[Any] = [command, *(option for option in command.params if isinstance(option, click.Option))]
        for part in parts:
            part.help = part.help and part.help.replace("FORMS", known_forms())
        super(ReadsRows, command).format_help(ctx, formatter)


OPTIONS = {"max_tokens": "--max-length"}  # of fields that have an option by another name
# what other programs call an option -> ours
OTHERS = {"output_dir": "--out", "output": "--out", "dataset": "--data", "train_file": "--data", "max_tokens": "--max-new-tokens"}


def nearest_option(command: click.Command, name: str) -> str | None:
    """Return the option that an unknown one probably means: another trainer's name for it, or the nearest spelling."""
    known = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    word = name.lstrip("-").replace("-", "_").lower()
    field = FOREIGN.get(word, word)
    own = (f"--{word.replace('_', '-')}", OPTIONS.get(field, f"--{field.replace('_', '-')}"), OTHERS.get(word, ""))
    value = ALL_LINEAR if word == "all_linear" else "VALUE"
    for option in own:
        if option in known:
            return f"{option} {value}" if value == ALL_LINEAR else option
    if "--set" in known and field in {*Training.model_fields, *Adapter.model_fields}:
        return f"--set {field}={value}"
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.5)), None)


recipe_argument = click.argument("recipe", shell_complete=recipes_beginning)
model = click.option("--model", help="The base model: a folder or a hub name.  [default: the recipe's]")
data = click.option(
    "--data",
    help="A folder in CL_Benchmark, TRACE, SAPT, or LLaMA-Factory layout, or a YAML list of files.  [default: the recipe's]",
)


def settings_option(number: str) -> Callable[[Callable], Callable]:
    """Return --set, with an example of a number of a method in its help."""
    words = f"Set a field of the recipe, or a number of the method ({number}); may be repeated."
    return click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help=words)


def _trackers(context: click.Context, option: click.Parameter, names: str | None) -> tuple[str, ...]:
    """The trackers of --track; those that cannot be used are refused here, before anything is loaded."""
    if names is None:
        return ()
    from anchorlora.runs.trackers import trackers_named

    return trackers_named(names)


track = click.option(
    "--track",
    metavar="NAMES",
    callback=_trackers,
    help="Log the run to Accelerate trackers: tensorboard,wandb,mlflow. Their files are in DIR/trackers.  [default: none]",
)


def recipe_options(command: Callable) -> Callable:
    """Add --model, --data, and --set."""
    return model(data(settings_option("RoutingOverlap.strength=0.05")(command)))


@dataclass(frozen=True)
class ExecutionOptions:
    """How runs are carried out; changes no result.  Every field is an argument of `run_sequence`."""

    save_every: int
    check_every: int
    allow_inexact: bool

    def words(self) -> list[str]:
        """The same as command-line words, for a separate process."""
        words = ["--save-every", str(self.save_every), "--check-every", str(self.check_every)]
        return [*words, "--allow-inexact"] if self.allow_inexact else words


def execution_options(command: Callable | None = None, *, together: bool = False) -> Callable:
    """Add --save-every, --check-every, and --allow-inexact, gathered in one argument `execution`."""
    if command is None:
        return partial(execution_options, together=together)

    @click.option(
        "--save-every",
        type=click.IntRange(min=0),
        metavar="N",
        default=protocol.SAVE_EVERY,
        show_default=True,
        help="Optimizer steps between saves within a task; 0: save within a task only when interrupted.",
    )
    @count_option(
        "--check-every",
        default=CHECK_EVERY,
        show_default=True,
        help="Optimizer steps between checks that protection holds; each task is also checked after its second and last step.",
    )
    @click.option(
        "--allow-inexact",
        is_flag=True,
        help="Resume a run that was started with other software, on another device, or with another number of processes.",
    )
    @wraps(command)
    def run(*args: Any, save_every: int, check_every: int, allow_inexact: bool, **others: Any) -> Any:
        from anchorlora.processes import refuse_other_launchers, refuse_several_processes

        refuse_other_launchers() if together else refuse_several_processes()
        return command(*args, execution=ExecutionOptions(save_every, check_every, allow_inexact), **others)

    return run
