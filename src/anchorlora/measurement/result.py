"""The request for an audit and its findings: values, no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.geometry import Subspace
from anchorlora.measurement.advice import advice, verdict
from anchorlora.measurement.directions import Protected
from anchorlora.measurement.layers import Audited

Find = Callable[[str], Protected]  # a layer's directions


@dataclass(frozen=True)
class AuditRequest:
    """Directions that an audit takes as protected; at most one of `cores`, `data` and `weights`."""

    cores: Path | None = None  # file of cores, as `anchorlora.features.write_cores` writes it
    data: Path | None = None  # text of the old task; its cores are computed with the adapter `before`
    weights: int | None = None  # number of leading singular directions of each base weight
    model: str | None = None

    def __post_init__(self) -> None:
        named = [f"--{name}" for name in ("cores", "data", "weights") if getattr(self, name) is not None]
        if len(named) > 1:
            raise InvalidValue(f"{' and '.join(named)} name different directions; give one of them")


@dataclass(frozen=True)
class AuditResult:
    """The numbers of an audit, and the files that it compared.

    Args:
        before: Earlier checkpoint, as given.
        after: Later checkpoint, as given.
        compared: "adapters" or "weights".
        protected: Which directions are protected, in words.
        storage: Coarsest type in which the compared numbers are stored, such as "float32".
        audited: The readings, overall and by layer.
        notes: Sentences about what else a reader should know.

    Example:
        >>> from anchorlora import audit
        >>> before, after, cores = checkpoints()
        >>> found = audit(before, after, cores=cores)
        >>> found.compared, found.audited.overall.kind
        ('adapters', 'zero-output block')
        >>> found.verdict.split(":")[0]
        'Not protected'
    """

    before: str
    after: str
    compared: str  # "adapters" or "weights"
    protected: str  # which directions, in words
    storage: str  # the coarsest type that the numbers are stored in
    audited: Audited
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """The finding, in one or two sentences."""
        return verdict(self.audited, self.storage)

    @property
    def advice(self) -> str:
        """Which constraints preserve the protected directions, and why."""
        return advice(self.audited)

    def as_dict(self) -> dict[str, Any]:
        """Return the audit as the JSON object of schema 2, which docs/reference.md describes."""
        return {
            "schema": 2,
            "before": self.before,
            "after": self.after,
            "compared": self.compared,
            "protected": self.protected,
            "storage": self.storage,
            "verdict": self.verdict,
            "advice": self.advice,
            "notes": list(self.notes),
            "overall": self.audited.overall.as_dict(),
            "layers": {name: reading.as_dict() for name, reading in self.audited.layers.items()},
        }


def by_layer(cores: Mapping[str, Subspace], layers: set[str], where: str) -> Find:
    """Return a function that gives the protected directions of a layer from a file of cores."""
    if set(cores) != layers:
        odd = sorted(set(cores) ^ layers)
        raise InvalidValue(
            f"{where} and the checkpoints do not fit: {odd[0]} and {len(odd) - 1} others are in one of them only; "
            "these cores were made for another model or other layers"
        )
    return lambda layer: Protected(cores[layer])
