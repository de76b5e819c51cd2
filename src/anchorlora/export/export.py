"""Exports of a trained adapter: one folder that plain PEFT or transformers loads, with a model card.

    cat     the adapter with every factor exact, of rank r t after t tasks
    svd     the nearest adapter of a lower rank, layer by layer
    merged  the base model's full weights with the update added

The folder appears whole or not at all. export.json beside the weights states the error of the form.

The logits of merged weights are compared in float32 arithmetic on both sides, the model with the adapter as trained against the
weights as written, so that they differ by the stored weights and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchorlora import embedded
from anchorlora.adapters import NOTHING, Anchor, attach, merge, mergeable, read_config, write_adapter
from anchorlora.audits.adapters import layers
from anchorlora.continual.seeds import stream
from anchorlora.devices import in_float64
from anchorlora.diagnostics import Drift, measure
from anchorlora.errors import InvalidValue
from anchorlora.export.source import ExportSource, export_source
from anchorlora.geometry import Factors, truncated
from anchorlora.models.load import load_weights
from anchorlora.models.trust import asked_for
from anchorlora.schemas.export import EXPORT_FILE, FORMS, Export, ExportedLayer, ExportedProtection, Form, Logits
from anchorlora.schemas.record import Record
from anchorlora.storage.files import new_folder, write_text

PACKAGES = ("anchorlora", "torch", "transformers", "peft", "safetensors")
CARD_FILE = "README.md"
Card = Callable[[Export, Record | None], str]


@dataclass(frozen=True)
class Request:
    """What to export.

    Args:
        form: "cat", "svd", or "merged".
        rank: The rank to reduce to; svd only.
        dtype: Precision of merged weights; by default the base model's.
        model: The base model; by default the one that the run or the adapter names.
        trust_remote_code: The commit whose model code may run; merged only.

    Raises:
        InvalidValue: If the fields do not fit together.

    Example:
        >>> from anchorlora.export.export import Request
        >>> Request("svd", rank=8).rank
        8
        >>> Request("svd")
        Traceback (most recent call last):
        anchorlora.errors.InvalidValue: --form svd needs the rank to reduce to; give it with --rank
    """

    form: Form = "cat"
    rank: int | None = None
    dtype: str | None = None
    model: str | None = None
    trust_remote_code: str | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InvalidValue(f"there is no form {self.form!r}; choose one of {', '.join(FORMS)}")
        if self.form == "svd" and self.rank is None:
            raise InvalidValue("--form svd needs the rank to reduce to; give it with --rank")
        if self.form != "svd" and self.rank is not None:
            raise InvalidValue(f"--rank is for --form svd, and the form is {self.form}")
        if self.rank is not None and self.rank < 1:
            raise InvalidValue(f"--rank takes a rank of 1 or more, not {self.rank}")
        if self.form != "merged" and self.dtype is not None:
            raise InvalidValue(f"--dtype is for --form merged; an adapter is float32, and the form is {self.form}")
        if self.form != "merged" and self.trust_remote_code is not None:
            raise InvalidValue(f"--trust-remote-code is for --form merged; no model is loaded, and the form is {self.form}")


@dataclass(frozen=True)
class Made:
    """An export in memory.

    Args:
        write: Fills an existing folder.
        dtype: Precision of what is written.
        layers: Rank and relative error of each layer.
        error: Relative error over all layers.
        protection: rho before and after, if known.
        rank: The largest rank that is written; None for merged weights.
        logits: Differences of logits; of merged weights only.
        same: Whether the base model is the one that the run was trained on; None if unknown.
    """

    write: Callable[[Path], None]
    dtype: str
    layers: list[ExportedLayer]
    error: float
    protection: ExportedProtection | None
    rank: int | None = None
    logits: Logits | None = None
    same: bool | None = None


def export(folder: Path, request: Request, *, to: Path, card: Card) -> Export:
    """Export a trained adapter to a new folder, with a model card and export.json.

    Args:
        folder: A run directory, one of its tasks, or a saved PEFT adapter; see `export_source`.
        request: What to export.
        to: The folder to write; it must not exist.
        card: Writes the model card; `anchorlora.reports.card.card` is ours.

    Returns:
        The content of export.json: relative error of each layer, rho before and after, differences of logits.

    Raises:
        InvalidValue: If `to` exists, or the folder holds nothing that can be exported; nothing is written then.

    Example:
        >>> from anchorlora.export.export import Request, export
        >>> from anchorlora.reports.card import card
        >>> model = tiny()
        >>> for name, p in model.named_parameters():
        ...     _ = p.data.normal_() if "lora_B" in name else None
        >>> model.save_pretrained(tmp / "adapter")
        >>> exact = export(tmp / "adapter", Request(), to=tmp / "exact", card=card)
        >>> exact.rank, exact.error
        (4, 0.0)
        >>> small = export(tmp / "adapter", Request("svd", rank=2), to=tmp / "small", card=card)
        >>> small.rank, 0 < small.error < 1
        (2, True)
        >>> sorted(path.name for path in (tmp / "small").iterdir())
        ['README.md', 'adapter_config.json', 'adapter_model.safetensors', 'export.json']
    """
    if to.exists():
        raise InvalidValue(f"{to} exists already; an export is written once, choose another --out")
    source = export_source(folder, model=request.model)
    if request.form == "merged":
        made = merged(source, request.dtype, commit=request.trust_remote_code)
    else:
        made = _adapter(source, request.rank)
    found = Export(
        form=request.form,
        dtype=made.dtype,
        rank=made.rank,
        asked_rank=request.rank,
        error=made.error,
        layers=made.layers,
        protection=made.protection,
        logits=made.logits,
        source=source.source,
        base=source.base.model_copy(update={"same": made.same}),
        versions={name: metadata.version(name) for name in PACKAGES},
    )
    with new_folder(to) as place:
        made.write(place)
        write_text(place / EXPORT_FILE, found.as_json())
        write_text(place / CARD_FILE, card(found, source.record))
    return found


def _adapter(source: ExportSource, rank: int | None) -> Made:
    """cat without a rank, svd with one; a rank above the adapter's own would only add zeros."""
    ours = source.factors
    rank = rank and min(rank, max(f.rank for f in ours.values()))
    written = {layer: _float32(truncated(f, rank) if rank else f) for layer, f in ours.items()}
    errors = {layer: float(written[layer].since(f).norm()) for layer, f in ours.items()}
    sizes = {layer: float(f.product().norm()) for layer, f in ours.items()}
    layers = [ExportedLayer(module=n, rank=written[n].rank, error=ratio(errors[n], sizes[n])) for n in ours]

    def write(place: Path) -> None:
        transposed = bool(read_config(source.adapter).get("fan_in_fan_out"))
        write_adapter(place, written, base=source.base.loadable, fan_in_fan_out=transposed)

    largest = max(f.rank for f in written.values())
    error = ratio(math.hypot(*errors.values()), math.hypot(*sizes.values()))
    return Made(write, "float32", layers, error, _protection(source, written), largest)


def _protection(source: ExportSource, written: Mapping[str, Factors]) -> ExportedProtection | None:
    exact = exact_drift(source)
    if exact is None:
        return None
    assert source.before is not None
    assert source.cores is not None
    same = all(written[n] is f or written[n].since(f).norm() == 0 for n, f in source.factors.items())
    now = exact if same else measure(Anchor(layers(source.before, written, source.cores)))
    return protection(source, exact, now.rho)


def exact_drift(source: ExportSource) -> Drift | None:
    """Return the drift of the last task on the directions protected during it; None if there were none.

    Args:
        source: What is exported.
    """
    if source.before is None or source.cores is None:
        return None
    return measure(Anchor(layers(source.before, source.factors, source.cores)))


def protection(source: ExportSource, exact: Drift, exported: float | None) -> ExportedProtection:
    """Return rho before and after an export.

    Args:
        source: What is exported.
        exact: The drift as trained.
        exported: rho as written.
    """
    return ExportedProtection(
        task=str(source.source.task), rho=exact.rho, rho_exported=exported, bound=exact.bound, chance=exact.chance
    )


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 if the whole is 0.

    Args:
        part: A norm.
        whole: A norm.
    """
    return part / whole if whole else 0.0


def _float32(factors: Factors) -> Factors:
    return Factors(factors.A.float(), factors.B.float(), factors.scale)


SEQUENCES, LENGTH = 8, 32  # token sequences on which logits are compared, the same for all exports
DTYPES = ("float32", "bfloat16", "float16")


def merged(source: ExportSource, dtype: str | None, *, commit: str | None = None) -> Made:
    """Merge an adapter into its base model, in memory.

    Args:
        source: What is exported.
        dtype: Precision of the result; by default the base model's.
        commit: The commit whose model code may run; by default none.

    Raises:
        InvalidValue: If there is no base model, or it needs code that was not allowed.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidValue(f"--dtype takes {', '.join(DTYPES)}, not {dtype!r}")
    if source.base_model.model is None:
        raise InvalidValue(f"{source.adapter} names no base model to merge into; give one with --model")
    base_model = asked_for(source.base_model, commit, where=source.named_in)
    model, tokenizer, sha256 = load_weights(base_model, folder=embedded.folder(source.base_model.model, "base_model"))
    mergeable(model, source.factors)
    stored = getattr(torch, dtype) if dtype else model.dtype
    model.float()  # represents every stored value exactly
    bare = logits_of(model)
    adapted = attach(model, source.adapter)
    live = logits_of(adapted)
    model = adapted.unload()
    exact = exact_drift(source)
    past = {"before": source.before, "cores": source.cores} if exact else {"before": NOTHING, "cores": NOTHING}
    found = merge(model, source.factors, stored, **past)
    layers = [ExportedLayer(module=name, rank=source.factors[name].rank, error=each.relative) for name, each in found.items()]
    error = ratio(math.hypot(*(r.error for r in found.values())), math.hypot(*(r.update for r in found.values())))
    moved, on_core = (math.hypot(*(getattr(r, name) or 0.0 for r in found.values())) for name in ("moved", "on_core"))
    kept = protection(source, exact, on_core / moved if moved else None) if exact else None
    seen = compared(live, logits_of(model), bare)

    def write(place: Path) -> None:
        model.to(stored).save_pretrained(place)
        tokenizer.save_pretrained(place)

    name = str(stored).removeprefix("torch.")
    return Made(write, name, layers, error, kept, logits=seen, same=_same(source, sha256))


def logits_of(model: Any) -> Tensor:
    """Return logits (sequences, length, vocabulary) on token sequences that depend only on the size of the vocabulary.

    Args:
        model: A causal language model.
    """
    size = model.get_input_embeddings().num_embeddings
    longest = getattr(model.config, "max_position_embeddings", LENGTH) or LENGTH
    ids = torch.randint(0, size, (SEQUENCES, min(LENGTH, longest)), generator=stream(0, "export/logits"))
    with torch.no_grad():
        return torch.cat([model(input_ids=row[None]).logits.float() for row in ids])


def compared(live: Tensor, written: Tensor, bare: Tensor) -> Logits:
    """Compare logits (sequences, length, vocabulary) of an exported model with those of the adapter on its base model.

    Args:
        live: Of the base model with the adapter.
        written: Of the exported weights.
        bare: Of the base model alone, to tell how much the adapter itself changes.
    """
    difference = (written - live).abs()
    return Logits(
        sequences=live.shape[0],
        tokens=live.shape[0] * live.shape[1],
        largest=float(difference.max()),
        mean=float(in_float64(difference).mean()),
        typical=float(in_float64(live - bare).square().mean().sqrt()),
        changed=float(in_float64(written.argmax(-1) != live.argmax(-1)).mean()),
    )


def _same(source: ExportSource, sha256: str | None) -> bool | None:
    """Whether the run was trained on these very weights; hashes of folders and commits of the hub cannot be compared."""
    if source.record is None:
        return None
    known, quantized = source.record.base_model.sha256, " over " in source.record.base_model.dtype
    if quantized:
        return False
    return known == sha256 if known and sha256 and len(known) == len(sha256) else None
