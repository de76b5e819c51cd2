"""The request for an audit and its findings; verdict and advice apply the selection rule to what an audit measured.

learned anchor (B_0 != 0)      dA V = 0 and dB = 0     Freeze("B"), ProjectDisplacement("A")        sfor
zero-output block (B_0 = 0)    A V = 0, B free         Retract("A"), ProjectDisplacement("A")       o-lora-hard
full weight                    dW V = 0                W <- W_0 + (W - W_0) P after every step

With examples of the old tasks at hand, their answers say which directions count; with nothing of them, two things are left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.geometry import Subspace
from anchorlora.measurement.directions import Protected
from anchorlora.measurement.layers import Audited, DriftReading
from anchorlora.text import amount

WORDS: dict[str, Any] = json.loads((files("anchorlora.measurement") / "advice.json").read_text(encoding="utf-8"))


def not_audited(names: Sequence[str]) -> str:
    """Return how many tensors differ beside the audited layers: `names`, at least one."""
    several = f"{len(names)} other tensors differ and were" if len(names) > 1 else "1 other tensor differs and was"
    return f"{several} not audited, first {names[0]}"


def _missing(reading: DriftReading) -> str:
    """Return what is missing for the condition that fits the kind of blocks."""
    preserved = {name for name, condition in reading.conditions.items() if condition.preserved}
    if reading.kind == "learned anchor":
        moved = {"displacement": "Freeze", "delta_b": "ProjectDisplacement"}
        held = preserved & moved.keys()
        return moved[held.pop()] if len(held) == 1 else "both"
    if reading.kind == "zero-output block":
        unknown = reading.conditions["displacement"].preserved is None
        return "Retract" if "displacement" in preserved else "start" if unknown else "A"
    return "two sides" if reading.left else "one side"


def _preserving(audited: Audited) -> str:
    """The condition that explains every layer, else the one that explains the whole."""
    held = {reading.preserved_by for reading in audited.layers.values() if reading.preserved_by}
    if len(held) == 1:
        return str(next(iter(held)))
    return audited.overall.preserved_by or "response"


def _exceptions(audited: Audited) -> str:
    over = [layer for layer, reading in audited.layers.items() if reading.status == "violated"]
    if not over:
        return ""
    among = f"{len(over)} of {amount(len(audited.layers), 'layer')}, first {over[0]}"
    exceed = "exceeds its" if len(over) == 1 else "exceed their"
    return f" {among}, {exceed} own tolerance, but not enough to change the overall verdict."


def _why(reading: DriftReading) -> str:
    paths = reading.paths
    if not paths:
        return ""
    return (
        f" The displacement term s B₀ ΔA V is {_percent(paths['displacement'])} of the change, "
        f"the ΔB term s ΔB A V {_percent(paths['delta_b'])}."
    )


def _percent(fraction: float | None) -> str:
    """A fraction in percent, or as a power of ten where that would print only zeros."""
    if fraction is None:
        return "-"
    if fraction == 0:
        return "0"
    return f"{100 * fraction:.3g} %" if fraction >= 1e-4 else f"{fraction:.1e}"


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
        beside: Names of what differs beside the audited layers.

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
    beside: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The finding, in one or two sentences."""
        reading, storage = self.audited.overall, self.storage
        drift = reading.right
        more = f" {not_audited(self.beside)}." if self.beside else ""
        if reading.status == "unmoved":
            return f"Nothing moved in the layers that were audited.{more}" if more else "Nothing moved."
        rho, bound = _percent(drift.rho), _percent(drift.bound)
        if reading.status == "unresolved":
            explained = "all of it" if drift.bound >= 1 else f"up to {bound}"
            return (
                f"Unresolved: rho is {rho}, but rounding to {storage} explains {explained}, and a random change would have "
                f"{_percent(drift.chance)}."
            )
        if reading.status == "preserved":
            full, by = "the displacement condition, ΔW V = 0", WORDS["preserved by"][_preserving(self.audited)]
            return (
                f"Protected: rho is {rho}, and rounding to {storage} explains up to {bound}. "
                f"Preserved by {full if reading.kind == 'full weight' else by}.{_exceptions(self.audited)}{more}"
            )
        assert drift.rho is not None
        times = f", {drift.rho / drift.chance:.2f} times the share of a random change" if drift.chance else ""
        what = f"{rho} of the change lies on protected directions{times}; rounding to {storage} explains {bound}"
        return f"Not protected: {what}.{_why(reading)}"

    @property
    def advice(self) -> str:
        """Which constraints preserve the protected directions, and why."""
        reading, storage = self.audited.overall, self.storage
        if reading.status == "unmoved" and self.beside:
            return "The audited layers are as they were; check that the other tensors were meant to change."
        if reading.status == "unmoved":
            return "There is nothing to protect against; check that AFTER is the checkpoint you mean."
        if reading.status == "unresolved":
            if storage in ("float32", "float64"):
                return f"A change this small is hidden by rounding to {storage}; audit a later checkpoint."
            return "Save both checkpoints in float32 and audit again; rounding hides a change this small."
        if reading.status == "preserved" and _preserving(self.audited) != "response":
            return "Keep the constraints that are in place."
        how = WORDS["advice"][reading.kind].format(missing=WORDS["missing"].get(_missing(reading)))
        with_examples = WORDS["with examples"].get(reading.kind, WORDS["with examples"]["other kinds"])
        return f"{how} {with_examples} {WORDS['without old data']}"

    def as_dict(self) -> dict[str, Any]:
        """Return the audit as the JSON object of schema 2, which docs/reference.md describes."""
        named = ("before", "after", "compared", "protected", "storage", "verdict", "advice")
        return {"schema": 2, **{name: getattr(self, name) for name in named}} | {
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
