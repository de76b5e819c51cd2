"""A request to `anchorlora eval`: tasks by name, by file or as a suite, the user's own prompts, and how all of them are asked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from anchorlora.errors import InvalidValue, UnknownName
from anchorlora_lab.suites import mmlu
from anchorlora_lab.suites.evaluation import PROMPTS

SUITES = {  # what practitioners look at for forgetting
    "forgetting": (mmlu.NAME, "arc_challenge", "hellaswag", "winogrande", "truthfulqa_mc2", "gsm8k", "ifeval"),
    "knowledge": (mmlu.NAME, "arc_challenge", "truthfulqa_mc2"),
    "reasoning": ("hellaswag", "winogrande", "gsm8k"),
}


@dataclass(frozen=True)
class Questions:
    """What is asked, and how."""

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


def named(tasks: Iterable[str], *, suites: Iterable[str] = (), prompts: bool = False) -> tuple[str, ...]:
    """Return the tasks that are asked for, each once."""
    listed, asked = list(tasks), list(suites)
    found, sets = ([name.strip() for each in given for name in each.split(",") if name.strip()] for given in (listed, asked))
    if listed and not found:
        raise InvalidValue("no task given; --task takes a name of lm_eval, a task file, or a comma list")
    if asked and not sets:
        raise InvalidValue(f"no suite given; --suite takes {', '.join(SUITES)}, or a comma list")
    for suite in sets:
        if suite not in SUITES:
            near = get_close_matches(suite, SUITES, n=3, cutoff=0.4) or list(SUITES)
            raise UnknownName(f"there is no suite {suite!r}; nearest: {', '.join(near)}")
    found = [*(task for suite in sets for task in SUITES[suite]), *found]
    return tuple(dict.fromkeys(found or ([] if prompts else [mmlu.NAME])))


def is_file(task: str) -> bool:
    """Return True if a task is given as a file rather than by name."""
    return task.endswith((".yaml", ".yml")) or os.sep in task
