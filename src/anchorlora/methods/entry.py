"""The catalog's entry of a method, besides its parts: what it is, when to take it, its place in tables and figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

Described = TypeVar("Described")
Scaled = Literal["as declared", "fisher", "sparsity"]

SHARED = "Shared adapter: fixed total rank"  # groups of the paper's main table, with the components that its other tables have
CUMULATIVE = "Cumulative adapter: matched block growth"
REFERENCE = "Other rehearsal-free references"
REPLAY = "Replay reference: historical examples available"
OUTSIDE = "Other methods"
GROUPS = (SHARED, CUMULATIVE, REFERENCE, REPLAY, OUTSIDE)

EXAMPLES, ROWS, NOTHING = (  # what is there at the end of each task
    "64 of its examples, then nothing",
    "feature rows only (text without answers)",
    "nothing but the base model",
)


@dataclass(frozen=True)
class Choice:
    """When a method is the one to take."""

    have: str  # what is there at the end of each task
    want: str  # what the method is best at, there
    rank: int = 1  # its place among the choices for what is there, from 1


@dataclass(frozen=True)
class Tunable:
    """A number of a method that is selected on a holdout."""

    parameter: str  # the number, by "Part.field"
    candidates: tuple[float, ...]  # four values, declared before any run
    scaled: Scaled = "as declared"  # which gradient the candidates are scaled by for another base model
    printed_at: float | None = None  # the value that the paper prints its scores for, where it says so


@dataclass(frozen=True)
class CatalogEntry:
    """The facts that tables, figures and pages need of a method and cannot read off its parts. Every field may be left out."""

    about: str = ""  # what it is, in a sentence
    when: str = ""
    group: str = OUTSIDE
    place: int | None = None
    leaves_open: str = ""  # what it leaves open of the paths by which a change can reach the core
    traced: bool = False  # whether it is a row of the paper's mechanism tables
    component: bool = False  # whether it is a row of the paper's tables of components, as every traced one is
    paired_with: str = ""  # the method that the paper compares it with
    compared_with: tuple[str, ...] | None = None
    choice: Choice | None = None  # when it is the one to take
    default: str = ""  # where `train` takes it if none is named: for a "new block", "beside" an old adapter, at the "same size"
    tunable: Tunable | None = None  # the number that is selected on a holdout

    def of(self, method: Described) -> Described:
        """Return the method with this entry."""
        return replace(method, entry=self)  # type: ignore[type-var]  # a `Method`, which this file does not know
