"""The request for an audit and its findings; verdict and advice apply the selection rule to what an audit measured.

learned anchor (B_0 != 0)      dA V = 0 and dB = 0     Freeze("B"), ProjectDisplacement("A")        sfor
zero-output block (B_0 = 0)    A V = 0, B free         Retract("A"), ProjectDisplacement("A")       o-lora-hard
full weight                    dW V = 0                W <- W_0 + (W - W_0) P after every step

With examples of the old tasks at hand, their answers say which directions count; with nothing of them, two things are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.geometry import Subspace
from anchorlora.measurement.directions import Protected
from anchorlora.measurement.layers import Audited, DriftReading

PRESERVED_BY = {
    "state": "the state condition, A V = 0",
    "displacement": "the displacement condition, ΔA V = 0 with B unchanged",
    "response": "no condition on the factors, only by their product, so the next step may violate it",
}


def verdict(audited: Audited, storage: str) -> str:
    """Return what an audit found, in one or two sentences."""
    reading = audited.overall
    drift = reading.right
    if reading.status == "unmoved":
        return "Nothing moved."
    rho, bound = _percent(drift.rho), _percent(drift.bound)
    if reading.status == "unresolved":
        return (
            f"Unresolved: rho is {rho}, but rounding to {storage} explains up to {bound}, and a random change would have "
            f"{_percent(drift.chance)}."
        )
    if reading.status == "preserved":
        by = "the displacement condition, ΔW V = 0" if reading.kind == "full weight" else PRESERVED_BY[_preserving(audited)]
        return (
            f"Protected: rho is {rho}, and rounding to {storage} explains up to {bound}. Preserved by {by}.{_exceptions(audited)}"
        )
    assert drift.rho is not None
    times = f", {drift.rho / drift.chance:.2f} times the share of a random change" if drift.chance else ""
    what = f"{rho} of the change lies on protected directions{times}; rounding to {storage} explains {bound}"
    return f"Not protected: {what}.{_why(reading)}"


def advice(audited: Audited) -> str:
    """Return which constraints preserve the protected directions, and why."""
    reading = audited.overall
    if reading.status == "unmoved":
        return "There is nothing to protect against; check that AFTER is the checkpoint you mean."
    if reading.status == "unresolved":
        return "Save both checkpoints in float32 and audit again; rounding hides a change this small."
    if reading.status == "preserved" and _preserving(audited) != "response":
        return "Keep the constraints that are in place."
    return " ".join([ADVICE[reading.kind](reading), WITH_EXAMPLES[reading.kind], WITHOUT_OLD_DATA])


def _for_learned(reading: DriftReading) -> str:
    preserved = {name for name, condition in reading.conditions.items() if condition.preserved}
    if "displacement" in preserved and "delta_b" not in preserved:
        missing = 'ΔA V = 0 holds, but B moved, so ΔB A₀ V is not zero: Freeze("B") is missing.'
    elif "delta_b" in preserved and "displacement" not in preserved:
        missing = 'B did not move, but A moved inside V: ProjectDisplacement("A") is missing.'
    else:
        missing = "both factors moved, so neither term is zero."
    return (
        'Use Freeze("B") and ProjectDisplacement("A") (method sfor): the adapter starts from a learned anchor (B₀ is not zero), so '
        f"ΔW V = s (B₀ ΔA + ΔB A) V is zero if ΔA V = 0 and ΔB = 0; {missing}"
    )


def _for_fresh(reading: DriftReading) -> str:
    moved = reading.conditions["displacement"]
    if moved.preserved:
        missing = 'A did not move inside V, but it started there: Retract("A") before the first step is missing.'
    elif moved.preserved is None:
        missing = "the start of A was not saved, so the files do not show whether A started inside V or moved there."
    else:
        missing = "A moved inside V."
    return (
        'Use Retract("A") before the first step and ProjectDisplacement("A") after every step (method o-lora-hard): the block '
        f"starts with B = 0, so A V = 0 implies B A V = 0 for any B, and B may train; {missing}"
    )


def _for_re_ranked(reading: DriftReading) -> str:
    return (
        "The rank or scale of the blocks changed, so their factors have no anchor to project from. Keep rank and scale and use "
        'Freeze("B") with ProjectDisplacement("A") (sfor), or freeze the old block and train a new one with Retract("A") and '
        'ProjectDisplacement("A") (o-lora-hard).'
    )


def _for_full(reading: DriftReading) -> str:
    step = "W <- W₀ + P_U (W - W₀) P on both sides" if reading.left else "W <- W₀ + (W - W₀) P"
    return (
        f"Project the displacement after every optimizer step, {step}: a projected gradient is no longer a projected step once "
        'the optimizer has scaled it. Or train a new LoRA block with Retract("A") and ProjectDisplacement("A") (o-lora-hard) '
        "instead of the weight."
    )


def _for_mixed(reading: DriftReading) -> str:
    return (
        'The layers differ. Where B started at zero, use Retract("A") and ProjectDisplacement("A") (o-lora-hard). Where B was '
        'learned, use Freeze("B") and ProjectDisplacement("A") (sfor). The table shows how each layer starts.'
    )


SHARED = "With examples of the old tasks, rank-split keeps the same condition while B trains."
FRESH = "With examples of the old tasks, sensitive-core protects what their answers depend on, and fold-16 at constant rank."
WITH_EXAMPLES = {"learned anchor": SHARED, "zero-output block": FRESH, "other rank": FRESH, "full weight": FRESH, "mixed": FRESH}
WITHOUT_OLD_DATA = (
    "Without any old data, anchorlora train --keep self protects what the model writes itself, and oplora the leading singular "
    "directions of each weight."
)
ADVICE = {
    "learned anchor": _for_learned,
    "zero-output block": _for_fresh,
    "other rank": _for_re_ranked,
    "full weight": _for_full,
    "mixed": _for_mixed,
}


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
    among = f"{len(over)} of {len(audited.layers)} layers, first {over[0]}"
    return f" {among}, exceed their own tolerance, but not enough to change the overall verdict."


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
