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
    """What is asked, and how.

    Args:
        tasks: Names of lm_eval tasks, or task files.
        prompts: A file of the user's own prompts and answers.
        data: A local folder of MMLU; by default, data come from the hub.
        limit: Questions per lm_eval task, the first ones; None for all. Of a group such as MMLU, per task in it.
        num_fewshot: Solved examples before each question; None for each task's own number.
        apply_chat_template: Ask through the tokenizer's chat template.
        batch: Inputs per forward pass; changes rounding only.

    Example:
        >>> from anchorlora_lab.suites.questions import Questions
        >>> Questions(("hellaswag", "arc_easy"), limit=100).name
        'hellaswag,arc_easy'
    """

    tasks: tuple[str, ...] = (mmlu.NAME,)
    prompts: Path | None = None
    data: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    batch: int = 8

    @property
    def name(self) -> str:
        """The tasks, joined by commas; the user's prompts are "prompts"."""
        names = [Path(task).name if is_file(task) else task for task in self.tasks]
        return ",".join([*names, *([PROMPTS] if self.prompts else [])])


def named(tasks: Iterable[str], *, suites: Iterable[str] = (), prompts: bool = False) -> tuple[str, ...]:
    """Return the tasks that are asked for, each once.

    Args:
        tasks: Names, files, or comma lists of them.
        suites: Names of suites, or comma lists of them; their tasks come first.
        prompts: The user has prompts, so no task is needed; else MMLU is asked by default.

    Raises:
        UnknownName: There is no such suite.
        InvalidValue: A list names no task, or no suite.

    Example:
        >>> named(["gsm8k,ifeval", "gsm8k"])
        ('gsm8k', 'ifeval')
        >>> named([])
        ('mmlu',)
        >>> named([], suites=["knowledge,reasoning"])
        ('mmlu', 'arc_challenge', 'truthfulqa_mc2', 'hellaswag', 'winogrande', 'gsm8k')
    """
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
    """Return True if a task is given as a file rather than by name.

    Args:
        task: A name or a path.

    Example:
        >>> is_file("gsm8k"), is_file("own/task.yaml")
        (False, True)
    """
    return task.endswith((".yaml", ".yml")) or os.sep in task
