"""The paper's printed values in our units; None stands for a value that was not printed.

UNITS is the one place where printed units become ours: the paper prints ratios in percent and scales WRP violations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

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
CROSS: dict[str, Any] = PUBLISHED["cross_backbone_mistral_7b_v0_3_order1"]
MECHANISM: dict[str, Any] = PUBLISHED["mechanism_endpoints_qwen3_8b"]


def in_our_units(field: str, value: float) -> float:
    """Return a printed value in the unit that we record."""
    return value * UNITS[field.removesuffix("_std")]


def printed_score(table: str, method: str, score: str) -> float | None:
    """Return AA, LA, BWT, or FM of a method, from a table of four-task scores."""
    return _value(PUBLISHED[table]["rows"].get(method), score)


def printed_by_order(method: str, order: str) -> float | None:
    """Return AA of a method in one order."""
    table = PUBLISHED["standard_cl_qwen3_8b_aa_by_order"]
    row = table["rows"].get(method)
    return in_our_units("AA", row[table["columns"].index(order)]) if row and order in table["columns"] else None


def printed_seed_sd(method: str, order: str, score: str) -> float | None:
    """Return the standard deviation of a score over the seeds of one order."""
    rows = PUBLISHED["seed_std_qwen3_8b"]["rows"]
    return _value(next((row for row in rows if (row["method"], row["order"]) == (method, order)), None), score)


def printed_cross(method: str, field: str) -> float | None:
    """Return a score of a method on the second base model, in order1."""
    return _value(CROSS["rows"].get(method), field)


def printed_of_seed(method: str, seed: int, score: str) -> float | None:
    """Return a score of one seed on the second base model, in order1."""
    return _listed(CROSS["per_seed"], method, seed, score)


def printed_pair(pair: str, seed: int, score: str) -> float | None:
    """Return a paired difference at one seed on the second base model, in order1."""
    return _listed(CROSS["paired"], pair, seed, score)


def printed_learning_change(pair: str) -> float | None:
    """Return the difference of LA in a pair, mean over seeds."""
    value = CROSS["learning_accuracy_change"].get(pair)
    return None if value is None else in_our_units("LA", value)


def printed_endpoint(method: str, field: str) -> float | None:
    """Return a value of the mechanism trace's last point."""
    return _value(MECHANISM["rows"].get(method), field.replace("rho", "rho_bod"))


def printed_violation_sd(method: str, when: str) -> float | None:
    """Return the standard deviation of the WRP violation."""
    row = MECHANISM["wrp_violation_std"].get(method, {})
    return next((_value(row, field) for field in row if field.startswith(f"{when}_")), None)


def printed_capability(row: str, field: str) -> float | None:
    """Return a value of MMLU after order1."""
    return _value(PUBLISHED["mmlu_qwen3_8b_after_order1"]["rows"].get(row), field)


def _value(row: Mapping[str, Any] | None, field: str) -> float | None:
    return None if row is None or field not in row else in_our_units(field, row[field])


def _listed(table: Mapping[str, Any], name: str, seed: int, score: str) -> float | None:
    row = table.get(name, {}).get(str(seed))
    return in_our_units(score, row[table["columns"].index(score)]) if row and score in table["columns"] else None
