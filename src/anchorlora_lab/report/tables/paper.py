"""The paper's values beside ours, only for runs of the paper's own model and data: a difference from any other run means nothing.

A run is the paper's own if its model has the name, parameter count, and full precision of the paper's model, if its task files
have the official bytes, and if it was trained and tested on as many examples as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anchorlora.pages.labels import TASKS
from anchorlora.pages.table import Table
from anchorlora_lab.report.published import MISTRAL, PUBLISHED, QWEN
from anchorlora_lab.report.records import Run

PARAMETERS = {QWEN: 8_190_735_360, MISTRAL: 7_248_023_552}  # of the models on the hub; the paper does not print them
OFFICIAL = "official bytes"  # as `tasks.files` says it
FILES = ("labels.json", "test.json", "train.json")
DELTA = "Δ: ours minus the paper's."
Printed = Mapping[str, Sequence[float | None]]  # by the heading of our column


def beside(table: Table, values: Printed, runs: Sequence[Run], *, printed_on: str = QWEN) -> Table:
    """Return the table with the paper's values and Δ beside ours, if every run is the paper's own; else the table as it is."""
    if not any_printed(values) or not all(is_papers_own(run, printed_on) for run in runs):
        return table
    return table.beside(values).noting_printed(f"paper: the published values on {printed_on}, with the same data. {DELTA}")


def is_papers_own(run: Run, base_model: str) -> bool:
    """Tell whether the paper's values for a base model may stand beside this run."""
    return has_base_model(run, base_model) and has_official_files(run) and _as_many_examples(run)


def has_base_model(run: Run, base_model: str) -> bool:
    """Tell whether a run used this model, unquantized: same name on the hub or last folder name, same parameter count."""
    ours, name = run.record.base_model, run.record.base_model.name.rstrip("/").split("/")[-1]
    alike = name.lower() == base_model.split("/")[-1].lower() and ours.parameters == PARAMETERS[base_model]
    return alike and " over " not in ours.dtype  # "bfloat16 over nf4"


def has_official_files(run: Run) -> bool:
    """Tell whether the tasks are the paper's and each of their files has the bytes of the official repository."""
    kinds = {tuple(path.split("/")[-2:]): file.kind for path, file in run.record.data.items()}
    return set(run.order) <= set(TASKS) and all(kinds.get((task, name)) == OFFICIAL for task in run.order for name in FILES)


def any_printed(values: Printed) -> bool:
    """Tell whether the paper has at least one of the values."""
    return any(value is not None for theirs in values.values() for value in theirs)


def _as_many_examples(run: Run) -> bool:
    """A trace is about training alone: how many examples it was tested on is nothing to it."""
    theirs, tested = PUBLISHED["protocol"], PUBLISHED["protocol"]["test_examples_per_task"]
    trained = all(run.setting("examples", task, "train") == theirs["train_examples"][task] for task in run.order)
    return trained and (bool(run.trace) or all(run.setting("examples", task, "test") == tested for task in run.order))
