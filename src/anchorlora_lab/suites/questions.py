"""A request to `anchorlora eval`: tasks by name, by file or as a suite, the user's own prompts, and how all of them are asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anchorlora.errors import InvalidValue, UnknownName, nearest_names
from anchorlora_lab.suites import mmlu
from anchorlora_lab.suites.evaluation import PROMPTS

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SUITES = {  # what practitioners look at for forgetting
    "forgetting": (mmlu.NAME, "arc_challenge", "hellaswag", "winogrande", "truthfulqa_mc2", "gsm8k", "ifeval"),
    "knowledge": (mmlu.NAME, "arc_challenge", "truthfulqa_mc2"),
    "reasoning": ("hellaswag", "winogrande", "gsm8k"),
}


@dataclass(frozen=True)
class Questions:
    """Tasks and prompts of an evaluation, and how they are asked."""

    tasks: tuple[str, ...] = (mmlu.NAME,)  # names of lm_eval tasks, or task files
    prompts: Path | None = None  # A file of the user's own prompts and answers
    data: Path | None = None  # A local folder of MMLU; by default, data come from the hub
    limit: int | None = None  # questions per lm_eval task, the first ones; None for all. Of a group such as MMLU, per task in it
    num_fewshot: int | None = None  # solved examples before each question; None for each task's own number
    apply_chat_template: bool = False  # ask through the tokenizer's chat template
    batch: int = 8  # inputs per forward pass; changes rounding only

    @property
    def name(self) -> str:
        """The tasks, joined by commas; the user's prompts are "prompts"."""
        names = [Path(task).name if is_file(task) else task for task in self.tasks]
        return ",".join([*names, *([PROMPTS] if self.prompts else [])])


def task_names(tasks: Iterable[str], *, suites: Iterable[str] = (), prompts: bool = False) -> tuple[str, ...]:
    """Return the tasks that are asked for, each once."""
    listed, asked = list(tasks), list(suites)
    names, sets = ([name.strip() for words in given for name in words.split(",") if name.strip()] for given in (listed, asked))
    if listed and not names:
        raise InvalidValue("no task given; --task takes a name of lm_eval, a task file, or a comma list")
    if asked and not sets:
        raise InvalidValue(f"no suite given; --suite takes {', '.join(SUITES)}, or a comma list")
    for suite in sets:
        if suite not in SUITES:
            raise UnknownName(f"there is no suite {suite!r}; {nearest_names(suite, SUITES)}")
    names = [*(task for suite in sets for task in SUITES[suite]), *names]
    return tuple(dict.fromkeys(names or ([] if prompts else [mmlu.NAME])))


def is_file(task: str) -> bool:
    """Return True if a task is given as a file rather than by name."""
    return task.endswith((".yaml", ".yml")) or os.sep in task


class EvalProgress:
    """Progress while a model is evaluated, on a bar if there is one; `note` takes what the user should know."""

    def __init__(self, bar: Progress | None = None, note: Callable[[str], None] = lambda line: None) -> None:
        self.bar, self.note = bar, note
        self.what = ""
        self.task: TaskID | None = None

    def measures(self, what: str) -> None:
        """Called before a model is evaluated."""
        self.what = what

    def begins(self, inputs: int) -> None:
        """Called before a series of inputs."""
        if self.bar is not None:
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.task = self.bar.add_task(self.what, total=inputs)

    def advance(self, inputs: int) -> None:
        """Called after some inputs."""
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, advance=inputs)
