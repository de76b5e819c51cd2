"""The paper's printed values in our units; None stands for a value that was not printed.

UNITS is the one place where printed units become ours: the paper prints ratios in percent and scales WRP violations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal

from anchorlora.pages.record import TASKS
from anchorlora.pages.table import Table
from anchorlora_lab.report.records import Run

PUBLISHED: dict[str, Any] = json.loads((files("anchorlora_lab.report") / "published.json").read_text(encoding="utf-8"))

# one printed unit, in our unit; "<field>_std" has the unit of its field
UNITS = {
    **dict.fromkeys(("AA", "LA", "mean"), 1.0),  # percent
    **dict.fromkeys(("BWT", "FM", "delta", "std"), 1.0),  # percentage points
    **dict.fromkeys(("d_eff", "d_old", "d_new", "d_block"), 1.0),  # native
    "rho_bod": 1e-2,  # percent -> fraction
    "pre_1e-3": 1e-3,  # scaled -> native
    "post_1e-9": 1e-9,
    "post_1e-12": 1e-12,
}
QWEN, MISTRAL = PUBLISHED["protocol"]["backbones"]
CROSS, MECHANISM = "cross_backbone_mistral_7b_v0_3_order1", "mechanism_endpoints_qwen3_8b"


def in_our_units(field: str, value: float) -> float:
    """Return a printed value in the unit that we record."""
    return value * UNITS[field.removesuffix("_std")]


def printed(table: str, row: str, field: str) -> float | None:
    """Return a value of a table with named rows: of a method, or of the base model."""
    return _value(PUBLISHED[table]["rows"].get(row), field)


def printed_by_order(method: str, order: str) -> float | None:
    """Return AA of a method in one order."""
    table = PUBLISHED["standard_cl_qwen3_8b_aa_by_order"]
    row = table["rows"].get(method)
    return in_our_units("AA", row[table["columns"].index(order)]) if row and order in table["columns"] else None


def printed_seed_sd(method: str, order: str | None, score: str) -> float | None:
    """Return the standard deviation of a score over the seeds of one order; None for an order that is not the paper's."""
    rows = PUBLISHED["seed_std_qwen3_8b"]["rows"]
    return _value(next((row for row in rows if (row["method"], row["order"]) == (method, order)), None), score)


def printed_of_seed(table: Literal["per_seed", "paired"], name: str, seed: int, score: str) -> float | None:
    """Return a score of a method, or a difference of a pair, at one seed on the second base model, in order1."""
    row = PUBLISHED[CROSS][table].get(name, {}).get(str(seed))
    columns = PUBLISHED[CROSS][table]["columns"]
    return in_our_units(score, row[columns.index(score)]) if row and score in columns else None


def printed_learning_change(pair: str) -> float | None:
    """Return the difference of LA in a pair, mean over seeds."""
    value = PUBLISHED[CROSS]["learning_accuracy_change"].get(pair)
    return None if value is None else in_our_units("LA", value)


def printed_endpoint(method: str, field: str) -> float | None:
    """Return a value of the mechanism trace's last point."""
    return printed(MECHANISM, method, field.replace("rho", "rho_bod"))


def printed_violation_sd(method: str, when: str) -> float | None:
    """Return the standard deviation of the WRP violation."""
    row = PUBLISHED[MECHANISM]["wrp_violation_std"].get(method, {})
    return next((_value(row, field) for field in row if field.startswith(f"{when}_")), None)


def _value(row: Mapping[str, Any] | None, field: str) -> float | None:
    return None if row is None or field not in row else in_our_units(field, row[field])


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
    return any(value is not None for column in values.values() for value in column)


def _as_many_examples(run: Run) -> bool:
    """True if the run has the paper's numbers of examples; a trace is about training alone, so its test examples do not count."""
    protocol, tested = PUBLISHED["protocol"], PUBLISHED["protocol"]["test_examples_per_task"]
    trained = all(run.setting("examples", task, "train") == protocol["train_examples"][task] for task in run.order)
    return trained and (bool(run.trace) or all(run.setting("examples", task, "test") == tested for task in run.order))
