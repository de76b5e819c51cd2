"""What the catalog says of a method besides its parts: what it is, when to take it, its place in tables and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scaled = Literal["as declared", "fisher", "sparsity"]

SHARED = "Shared adapter: fixed total rank"  # groups of the paper's main table, with the components that its other tables have
CUMULATIVE = "Cumulative adapter: matched block growth"
REFERENCE = "Other rehearsal-free references"
REPLAY = "Replay reference: historical examples available"
OUTSIDE = "Methods that the paper does not have"
GROUPS = (SHARED, CUMULATIVE, REFERENCE, REPLAY, OUTSIDE)

EXAMPLES, ROWS, NOTHING = (  # what is there at the end of each task
    "64 of its examples, then nothing",
    "feature rows only (text without answers)",
    "nothing but the base model",
)


@dataclass(frozen=True)
class Choice:
    """When a method is the one to take.

    Args:
        have: What is there at the end of each task.
        want: What the method is best at, there.
        rank: Its place among the choices for what is there, from 1.
    """

    have: str
    want: str
    rank: int = 1


@dataclass(frozen=True)
class Tunable:
    """A number of a method that is selected on a holdout.

    Args:
        parameter: The number, by "Part.field".
        candidates: Four values, declared before any run.
        scaled: Which gradient the candidates are scaled by for another base model.
        printed_at: The value that the paper prints its scores for, where it says so.
    """

    parameter: str
    candidates: tuple[float, ...]
    scaled: Scaled = "as declared"
    printed_at: float | None = None


@dataclass(frozen=True)
class CatalogEntry:
    """What tables, figures and pages need to know of a method and cannot read off its parts.  Every field may be left out.

    Args:
        about: What it is, in a sentence.
        when: When to use it, in a sentence.
        group: Its group in tables of scores.
        place: Its place among the methods of its family, which gives its color, marker and line; None for one drawn from its name.
        leaves_open: What it leaves open of the paths by which a change can reach the core.
        traced: Whether it is a row of the paper's mechanism tables.
        component: Whether it is a row of the paper's tables of components.
        paired_with: The method that the paper compares it with.
        compared_with: Methods whose scores are subtracted from its own; None for the one that it extends.
        choice: When it is the one to take.
        tunable: The number that is selected on a holdout.
    """

    about: str = ""
    when: str = ""
    group: str = OUTSIDE
    place: int | None = None
    leaves_open: str = ""
    traced: bool = False
    component: bool = False
    paired_with: str = ""
    compared_with: tuple[str, ...] | None = None
    choice: Choice | None = None
    tunable: Tunable | None = None
