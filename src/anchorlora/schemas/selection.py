"""The manifest of a selection, selection.json: one number of a method, chosen among declared candidates."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from anchorlora.errors import InvalidValue
from anchorlora.schemas.json import FilePart, read_file

FILE = "selection.json"


class Candidate(FilePart):
    """One value and what it reached.

    Attributes:
        value: The candidate.
        AA: Mean accuracy over the tasks at the end, in percent; None where the run failed.
        accuracy: Accuracies of the last row, in percent; None where the run failed.
        error: Why it failed.
    """

    value: float
    AA: float | None
    accuracy: list[float] | None
    error: str | None = None


class Selection(FilePart):
    """The manifest of a selection, selection.json.

    Attributes:
        method: The method that it was made for.
        parameter: The number that was selected, by "FilePart.field".
        declared: The candidates as they were declared.
        scale: The measured gradients and the factor that they gave; None where candidates are used as declared.
        candidates: What each candidate reached.
        selected: The value that was chosen.
        recipe: Name of the recipe.
        base_model: The base model, as a record has it.
        order: Names of the tasks as they were trained.
        seed: The seed of all candidates.
        protocol: Every choice that a reader could make differently.
        holdout_sha256: Hash of the holdout examples.
        data: Hash and kind of each data file.
    """

    schema_: Annotated[Literal[2], Field(alias="schema")] = 2
    method: str
    parameter: str
    declared: list[float]
    scale: dict[str, float] | None  # the measured gradient scale, and the factor that it gave
    candidates: list[Candidate]
    selected: float
    recipe: str
    base_model: dict[str, Any]
    order: list[str]
    seed: int
    protocol: dict[str, Any]
    holdout_sha256: str
    data: dict[str, Any]

    @model_validator(mode="after")
    def _declared(self) -> Selection:
        if self.selected not in [c.value for c in self.candidates]:
            known = ", ".join(f"{c.value:g}" for c in self.candidates)
            raise InvalidValue(f"the selected value {self.selected:g} is none of the declared candidates {known}")
        return self

    @property
    def settings(self) -> dict[str, float]:
        """The chosen number, as `Method.changed` takes it."""
        return {self.parameter: self.selected}

    @property
    def end(self) -> str:
        """ "smallest" or "largest" if the chosen value is that candidate, so that values beyond it were not tried; or empty."""
        values = [c.value for c in self.candidates]
        ends = {min(values): "smallest", max(values): "largest"} if len(values) > 1 else {}
        return ends.get(self.selected, "")

    @property
    def sha256(self) -> str:
        """Hash of the manifest, which records of runs that follow it name."""
        return hashlib.sha256(self.as_json().encode()).hexdigest()

    def as_json(self) -> str:
        """Return the text of selection.json."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def read_selection(path: Path) -> Selection:
    """Read a manifest.

    Args:
        path: A selection.json or the folder that holds one.

    Raises:
        ValueError: The file is missing or a field is wrong; the message names both.

    Example:
        >>> from anchorlora.schemas.selection import read_selection
        >>> read_selection(tmp)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        anchorlora.errors.InvalidValue: there is no selection at ...selection.json; anchorlora select makes one
    """
    file = path / FILE if path.is_dir() else path
    try:
        return read_file(file, Selection, remedy="run anchorlora select again")
    except FileNotFoundError:
        raise InvalidValue(f"there is no selection at {file}; anchorlora select makes one") from None
