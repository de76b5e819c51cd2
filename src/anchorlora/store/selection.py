"""The manifest of a selection, selection.json: one number of a method, chosen among declared candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from anchorlora.errors import InvalidValue
from anchorlora.store.json import FilePart, read_file
from anchorlora.store.seal import content_hash

FILE = "selection.json"


class Candidate(FilePart):
    """One value and what it reached."""

    value: float
    AA: float | None  # mean accuracy over the tasks at the end, in percent; None where the run failed
    accuracy: list[float] | None  # accuracies of the last row, in percent; None where the run failed
    error: str | None = None


class Selection(FilePart):
    """The manifest of a selection, selection.json."""

    schema_: Annotated[Literal[2], Field(alias="schema")] = 2
    method: str  # the method that it was made for
    parameter: str  # the number that was selected, by "FilePart.field"
    declared: list[float]  # the candidates as they were declared
    scale: dict[str, float] | None  # the measured gradient scale, and the factor that it gave
    candidates: list[Candidate]  # what each candidate reached
    selected: float  # the value that was chosen
    recipe: str
    base_model: dict[str, Any]  # the base model, as a record has it
    order: list[str]  # names of the tasks as they were trained
    seed: int
    protocol: dict[str, Any]  # every choice that a reader could make differently
    holdout_sha256: str
    data: dict[str, Any]  # hash and kind of each data file

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
        return content_hash(self.as_json())

    def as_json(self) -> str:
        """Return the text of selection.json."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def read_selection(path: Path) -> Selection:
    """Read a manifest."""
    file = path / FILE if path.is_dir() else path
    try:
        return read_file(file, Selection, remedy="run anchorlora select again")
    except FileNotFoundError:
        raise InvalidValue(f"there is no selection at {file}; anchorlora select makes one") from None
