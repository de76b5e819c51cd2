"""What an audit is asked, and what it says: values, no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anchorlora.audits.advice import advice, verdict
from anchorlora.audits.directions import Protected
from anchorlora.audits.layers import Audited
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Subspace

Find = Callable[[str], Protected]  # a layer's directions


@dataclass(frozen=True)
class Ask:
    """Which directions count as protected; at most one of cores, data and weights.  model: the base model's folder."""

    cores: Path | None = None
    data: Path | None = None
    weights: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        named = [f"--{name}" for name in ("cores", "data", "weights") if getattr(self, name) is not None]
        if len(named) > 1:
            raise InvalidValue(f"{' and '.join(named)} name different directions; give one of them")


@dataclass(frozen=True)
class Findings:
    """What an audit found, with where it looked."""

    before: str
    after: str
    compared: str  # "adapters" or "weights"
    protected: str  # which directions, in words
    storage: str  # the coarsest type that the numbers are stored in
    audited: Audited
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The fields of docs/reference.md."""
        return {
            "schema": 1,
            "before": self.before,
            "after": self.after,
            "compared": self.compared,
            "protected": self.protected,
            "storage": self.storage,
            "verdict": verdict(self.audited, self.storage),
            "advice": advice(self.audited),
            "notes": list(self.notes),
            "overall": self.audited.overall.as_dict(),
            "layers": {name: reading.as_dict() for name, reading in self.audited.layers.items()},
        }


def by_layer(cores: Mapping[str, Subspace], layers: set[str], where: str) -> Find:
    """The directions of a file of cores.  Raises ValueError unless it has exactly these layers."""
    if set(cores) != layers:
        odd = sorted(set(cores) ^ layers)
        raise InvalidValue(
            f"{where} and the checkpoints do not fit: {odd[0]} and {len(odd) - 1} others are in one of them only; "
            "these cores were made for another model or other layers"
        )
    return lambda layer: Protected(cores[layer])


def type_name(dtype: torch.dtype) -> str:
    """float32, without the library's name."""
    return str(dtype).removeprefix("torch.")
