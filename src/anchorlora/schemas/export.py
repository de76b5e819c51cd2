"""Schema 1 of export.json: what an exported folder holds, and what its form costs.

Errors and ratios are fractions; what is undefined is null.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from anchorlora.schemas.json import FilePart, read_file

EXPORT_FILE = "export.json"
Form = Literal["cat", "svd", "merged"]
FORMS: tuple[Form, ...] = ("cat", "svd", "merged")


class Source(FilePart):
    """What was exported.

    Args:
        kind: "run" or "adapter".
        number: Number of the task in its run, from 1; null for an adapter without a run.
        task: Name of the task; null for an adapter without a run.
        tasks: Number of tasks of the whole run.
        finished: True if the run has a record.
        adapter_sha256: Hash of the adapter.
        dtype: Type of its factors.
    """

    kind: Literal["run", "adapter"]
    number: int | None
    task: str | None
    tasks: int | None  # of the whole run
    finished: bool | None  # whether the run has a record
    adapter_sha256: str
    dtype: str  # of its factors


class Base(FilePart):
    """The base model; never a local path.

    Args:
        name: Its name.
        hub: Its name on the hub, or null.
        revision: Its revision.
        same: True if its weights are those that the run was trained on; null if unknown.
    """

    name: str | None
    hub: str | None
    revision: str | None
    same: bool | None = None

    @property
    def loadable(self) -> str | None:
        """A name that works on every machine: on the hub, or embedded in this package; None if there is none."""
        return self.hub or (self.name if (self.name or "").startswith("embedded:") else None)


class ExportedLayer(FilePart):
    """One adapted layer.

    Args:
        module: Its path.
        rank: Rank that was written.
        error: |what is written - s B A| / |s B A|.
    """

    module: str
    rank: int
    error: float


class ExportedProtection(FilePart):
    """The last task's change on the directions protected during it, before and after the export.

    Args:
        task: Name of the task.
        rho: Share of the change on protected directions, as trained.
        rho_exported: The same as exported.
        bound: Numerical tolerance: the largest rho that rounding explains.
        chance: rho of a random change.
        served: Type -> rho if a server rounds the factors to it, "float16" and "bfloat16"; empty for merged weights.
    """

    task: str
    rho: float | None
    rho_exported: float | None
    bound: float  # the largest rho that counts as zero
    chance: float | None
    served: dict[str, float | None] = Field(default_factory=dict)  # type that a server computes in -> rho


class Logits(FilePart):
    """Differences between the exported model and the adapter on its base, on fixed token sequences, in float32 arithmetic.

    Args:
        sequences: Number of sequences.
        tokens: Positions compared.
        largest: Largest difference.
        mean: Mean difference.
        typical: Root mean square of what the adapter itself changes, to compare with.
        changed: Share of positions whose likeliest token differs.
    """

    sequences: int
    tokens: int  # positions compared
    largest: float
    mean: float
    typical: float  # rms of what the adapter itself changes, to compare with
    changed: float  # share of positions whose likeliest token is another


class Export(FilePart):
    """Contents of an export.json.

    Args:
        schema_: Version of the schema, "schema" in the file.
        form: "cat", "svd" or "merged".
        dtype: Type that was written.
        rank: Rank of the adapter that was written, the same in every layer; null for merged weights.
        asked_rank: Rank that was asked for; null if none was.
        error: Error over all layers, sqrt(sum |error|^2 / sum |s B A|^2).
        layers: Each adapted layer.
        protection: ExportedProtection before and after; null if the source has no cores.
        logits: Differences of the logits; null if they were not compared.
        source: What was exported.
        base: The base model.
        versions: Library -> version.
        max_lora_rank: The rank that a server is started with for this adapter; null for merged weights.
        tokenizer: True if a tokenizer lies beside the weights.
        license: License that the card of the source or of the base model names, or null.
        datasets: Data sets on the hub that the source's card names.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    form: Form
    dtype: str
    rank: int | None  # of the adapter that was written; null for merged weights
    asked_rank: int | None
    error: float  # over all layers: sqrt(sum |error|^2 / sum |s B A|^2)
    layers: list[ExportedLayer]
    protection: ExportedProtection | None
    logits: Logits | None
    source: Source
    base: Base
    versions: dict[str, str]
    max_lora_rank: int | None = None
    tokenizer: bool = False
    license: str | None = None
    datasets: list[str] = Field(default_factory=list)

    def as_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(self.model_dump(by_alias=True), indent=1, allow_nan=False) + "\n"


def read_export(path: Path) -> Export:
    """Read an export.json.

    Args:
        path: The file.

    Raises:
        InvalidValue: It is not a valid export.json; the message names file, field and remedy.
    """
    return read_file(path, Export, remedy="export again")
