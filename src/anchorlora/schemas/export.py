"""The shape of export.json, schema 1: what an exported folder holds, and what its form cost.

Errors and ratios are fractions; what is undefined is null.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from anchorlora.schemas.json import Part, read_file

EXPORT_FILE = "export.json"
Form = Literal["cat", "svd", "merged"]
FORMS: tuple[Form, ...] = ("cat", "svd", "merged")


class Source(Part):
    """What was exported.  number, task: of a run, 1-based; null for an adapter without one."""

    kind: Literal["run", "adapter"]
    number: int | None
    task: str | None
    tasks: int | None  # of the whole run
    finished: bool | None  # whether the run has a record
    adapter_sha256: str
    dtype: str  # of its factors


class Base(Part):
    """The model underneath; never a local path.

    hub: its name on the hub, or null. same: whether its weights are those that the run was trained on; null if not known.
    """

    name: str | None
    hub: str | None
    revision: str | None
    same: bool | None = None

    @property
    def loadable(self) -> str | None:
        """A name that works on every machine: on the hub, or embedded in this package."""
        return self.hub or (self.name if (self.name or "").startswith("embedded:") else None)


class Layer(Part):
    """One adapted layer.  error: |what is written - s B A| / |s B A|."""

    module: str
    rank: int
    error: float


class Protection(Part):
    """The last task's change on the directions protected during it: before the export, and as what was written has it."""

    task: str
    rho: float | None
    rho_exported: float | None
    bound: float  # the largest rho that counts as zero
    chance: float | None


class Logits(Part):
    """Differences between the exported model and the adapter on its base, on fixed token sequences, in float32 arithmetic."""

    sequences: int
    tokens: int  # positions compared
    largest: float
    mean: float
    typical: float  # rms of what the adapter itself changes, to compare with
    changed: float  # share of positions whose likeliest token is another


class Export(Part):
    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    form: Form
    dtype: str
    rank: int | None  # of the adapter that was written; the largest, where layers differ; null for merged weights
    asked_rank: int | None
    error: float  # over all layers: sqrt(sum |error|^2 / sum |s B A|^2)
    layers: list[Layer]
    protection: Protection | None
    logits: Logits | None
    source: Source
    base: Base
    versions: dict[str, str]

    def as_json(self) -> str:
        return json.dumps(self.model_dump(by_alias=True), indent=1, allow_nan=False) + "\n"


def read_export(path: Path) -> Export:
    """An export.json, validated.  Raises ValueError that names file, field and remedy."""
    return read_file(path, Export, remedy="export again")
