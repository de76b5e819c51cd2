"""An adapter made ready to be served or published: one folder that plain PEFT or transformers loads, with a model card.

    cat     the adapter as it is, every factor exact: of rank r t after t tasks
    svd     the nearest adapter of a lower rank, layer by layer
    merged  the model's full weights with the update in them

The folder appears whole or not at all. export.json beside the weights says what the form cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from anchorlora.adapters import Scope, write_adapter
from anchorlora.diagnostics import Drift, measure
from anchorlora.experiments.compare import sites
from anchorlora.experiments.export_source import Origin, origin_of
from anchorlora.experiments.files import new_folder, write_text
from anchorlora.export_file import EXPORT_FILE, FORMS, Export, Form, Layer, Logits, Protection
from anchorlora.geometry import Factors, truncated
from anchorlora.record import Record

PACKAGES = ("anchorlora", "torch", "transformers", "peft", "safetensors")
CARD_FILE = "README.md"
Card = Callable[[Export, Record | None], str]


@dataclass(frozen=True)
class Request:
    """What is asked for.  rank: of svd; dtype: of merged weights, by default the base's own; model: the backbone, if another;
    trust_remote_code: of merged, the commit whose code of the backbone is run.
    """

    form: Form = "cat"
    rank: int | None = None
    dtype: str | None = None
    model: str | None = None
    trust_remote_code: str | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"there is no form {self.form!r}; choose one of {', '.join(FORMS)}")
        if self.form == "svd" and self.rank is None:
            raise ValueError("--form svd needs the rank to reduce to; give it with --rank")
        if self.form != "svd" and self.rank is not None:
            raise ValueError(f"--rank is for --form svd, and the form is {self.form}")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"--rank takes a rank of 1 or more, not {self.rank}")
        if self.form != "merged" and self.dtype is not None:
            raise ValueError(f"--dtype is for --form merged; an adapter is float32, and the form is {self.form}")
        if self.form != "merged" and self.trust_remote_code is not None:
            raise ValueError(f"--trust-remote-code is for --form merged; no model is loaded, and the form is {self.form}")


@dataclass(frozen=True)
class Made:
    """An export in memory: what writes it, and what it cost."""

    write: Callable[[Path], None]  # fills an existing folder
    dtype: str
    layers: list[Layer]
    error: float
    protection: Protection | None
    rank: int | None = None
    logits: Logits | None = None
    same: bool | None = None


def export(folder: Path, request: Request, *, to: Path, card: Card) -> Export:
    """Export what lies in `folder` (see `origin_of`) to a new folder `to`, with a model card that `card` writes.

    Raises ValueError before anything is written for what cannot be exported.
    """
    if to.exists():
        raise ValueError(f"{to} exists already; an export is written once, choose another --to")
    origin = origin_of(folder, model=request.model)
    if request.form == "merged":
        from anchorlora.experiments.merged import merged

        made = merged(origin, request.dtype, commit=request.trust_remote_code)
    else:
        made = _adapter(origin, request.rank)
    found = Export(
        form=request.form,
        dtype=made.dtype,
        rank=made.rank,
        asked_rank=request.rank,
        error=made.error,
        layers=made.layers,
        protection=made.protection,
        logits=made.logits,
        source=origin.source,
        base=origin.base.model_copy(update={"same": made.same}),
        versions={name: metadata.version(name) for name in PACKAGES},
    )
    with new_folder(to) as place:
        made.write(place)
        write_text(place / EXPORT_FILE, found.as_json())
        write_text(place / CARD_FILE, card(found, origin.record))
    return found


def _adapter(origin: Origin, rank: int | None) -> Made:
    """cat without a rank, svd with one; a rank above what there is to hold would only add zeros."""
    ours = origin.factors
    rank = rank and min(rank, max(f.rank for f in ours.values()))
    written = {layer: _float32(truncated(f, rank) if rank else f) for layer, f in ours.items()}
    errors = {layer: float(written[layer].since(f).norm()) for layer, f in ours.items()}
    sizes = {layer: float(f.product().norm()) for layer, f in ours.items()}
    layers = [Layer(module=n, rank=written[n].rank, error=ratio(errors[n], sizes[n])) for n in ours]

    def write(place: Path) -> None:
        write_adapter(place, written, base=origin.base.loadable)

    largest = max(f.rank for f in written.values())
    error = ratio(math.hypot(*errors.values()), math.hypot(*sizes.values()))
    return Made(write, "float32", layers, error, _protection(origin, written), largest)


def _protection(origin: Origin, written: Mapping[str, Factors]) -> Protection | None:
    exact = exact_drift(origin)
    if exact is None:
        return None
    assert origin.before is not None
    assert origin.cores is not None
    same = all(written[n] is f or written[n].since(f).norm() == 0 for n, f in origin.factors.items())
    now = exact if same else measure(Scope(sites(origin.before, written, origin.cores)))
    return protection(origin, exact, now.rho)


def exact_drift(origin: Origin) -> Drift | None:
    """What the last task moved, on the directions protected during it; None where an origin has none."""
    if origin.before is None or origin.cores is None:
        return None
    return measure(Scope(sites(origin.before, origin.factors, origin.cores)))


def protection(origin: Origin, exact: Drift, exported: float | None) -> Protection:
    return Protection(task=str(origin.source.task), rho=exact.rho, rho_exported=exported, bound=exact.bound, chance=exact.chance)


def ratio(part: float, whole: float) -> float:
    """part / whole; 0 of nothing."""
    return part / whole if whole else 0.0


def _float32(factors: Factors) -> Factors:
    return Factors(factors.A.float(), factors.B.float(), factors.scale)
