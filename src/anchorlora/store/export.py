"""Schema 1 of export.json: what an exported folder holds, and what its form costs.

Errors and ratios are fractions; what is undefined is null.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from anchorlora.store.json import FilePart

EXPORT_FILE = "export.json"
Form = Literal["cat", "svd", "merged"]
FORMS: tuple[Form, ...] = ("cat", "svd", "merged")


class Source(FilePart):
    """The source of an export."""

    kind: Literal["run", "adapter"]  # "run" or "adapter"
    number: int | None  # number of the task in its run, from 1; null for an adapter without a run
    task: str | None  # name of the task; null for an adapter without a run
    tasks: int | None  # of the whole run
    finished: bool | None  # whether the run has a record
    adapter_sha256: str
    dtype: str  # of its factors


class Base(FilePart):
    """The base model; never a local path."""

    name: str | None
    hub: str | None  # its name on the hub, or null
    revision: str | None
    same: bool | None = None  # True if its weights are those that the run was trained on; null if unknown

    @property
    def loadable(self) -> str | None:
        """A name that works on every machine: on the hub, or embedded in this package; None if there is none."""
        return self.hub or (self.name if (self.name or "").startswith("embedded:") else None)


class ExportedLayer(FilePart):
    """One adapted layer."""

    module: str
    rank: int  # rank that was written
    error: float  # |what is written - s B A| / |s B A|


class ExportedProtection(FilePart):
    """The last task's change on the directions protected during it, before and after the export."""

    task: str
    rho: float | None  # share of the change on protected directions, as trained
    rho_exported: float | None
    bound: float  # the largest rho that counts as zero
    chance: float | None  # rho of a random change
    served: dict[str, float | None] = Field(default_factory=dict)  # type that a server computes in -> rho


class Logits(FilePart):
    """Differences between the exported model and the adapter on its base, on fixed token sequences, in float32 arithmetic."""

    sequences: int
    tokens: int  # positions compared
    largest: float
    mean: float
    typical: float  # rms of what the adapter itself changes, to compare with
    changed: float  # share of positions whose likeliest token is another


class Export(FilePart):
    """Contents of an export.json."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1  # version of the schema, "schema" in the file
    form: Form  # "cat", "svd" or "merged"
    dtype: str  # type that was written
    rank: int | None  # of the adapter that was written; null for merged weights
    asked_rank: int | None  # rank that was asked for; null if none was
    scale: float = 1.0  # what the last task's change was multiplied by; an adapter without a run is one change
    error: float  # over all layers: sqrt(sum |error|^2 / sum |s B A|^2)
    layers: list[ExportedLayer]  # each adapted layer
    whole: list[str] = Field(default_factory=list)  # modules whose whole weights come with the adapter, unchanged
    protection: ExportedProtection | None  # exportedProtection before and after; null if the source has no cores
    logits: Logits | None  # differences of the logits; null if they were not compared
    source: Source  # what was exported
    base: Base
    versions: dict[str, str]  # library -> version
    max_lora_rank: int | None = None  # the rank that a server is started with for this adapter; null for merged weights
    tokenizer: bool = False  # True if a tokenizer lies beside the weights
    stop_token_ids: list[int] = Field(default_factory=list)  # ends of its template's answers that the base model does not stop at
    license: str | None = None  # license that the card of the source or of the base model names, or null
    datasets: list[str] = Field(default_factory=list)  # data sets on the hub that the source's card names
