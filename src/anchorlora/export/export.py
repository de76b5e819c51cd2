"""Exports of a trained adapter: one folder that plain PEFT or transformers loads, with a model card.

    cat     the adapter with every factor exact, of rank r t after t tasks
    svd     the nearest adapter of a lower rank, layer by layer
    merged  the base model's full weights with the update added

The folder appears whole or not at all. export.json beside the weights states the error of the form.

An adapter that is written has one rank and one scale, since servers read no patterns. Layers of a lower rank get rows of zeros in A
and columns of zeros in B, which is exact. Layers of another scale s_l take the ratio s_l / s into B: each entry is rounded at most
once, and not at all if the ratio is a power of two.

The logits of merged weights are compared in float32 arithmetic on both sides, the model with the adapter as trained against the
weights as written, so that they differ by the stored weights and nothing else.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from anchorlora.adapters import NOTHING, Anchor, attach, merge, mergeable, write_adapter
from anchorlora.adapters.files import fitted
from anchorlora.continual.seeds import stream
from anchorlora.devices import in_float64, type_name
from anchorlora.errors import InvalidValue
from anchorlora.export.serving import accepted_rank
from anchorlora.export.source import CARD, ExportSource, beside, modules_of, processing_files, terms, unknown_ends
from anchorlora.geometry import Factors, one_scale, scaled_change, truncated
from anchorlora.measurement import Drift, measure
from anchorlora.measurement.adapters import layers
from anchorlora.models.load import ends_of, load_weights, same_files, stops_of
from anchorlora.models.tokenizer import of_adapter
from anchorlora.models.trust import asked_for
from anchorlora.store.adapter_config import read_config
from anchorlora.store.export import EXPORT_FILE, Export, ExportedLayer, ExportedProtection, Form, Logits
from anchorlora.store.files import new_folder, write_text
from anchorlora.store.record import Record

PACKAGES = ("anchorlora", "torch", "transformers", "peft", "safetensors")
SERVED = ("float16", "bfloat16")  # types that servers cast factors to
Card = Callable[[Export, Record | None], str]


@dataclass(frozen=True)
class Request:
    """Form, rank and type of an export."""

    form: Form = "cat"  # "cat", "svd", or "merged"
    rank: int | None = None  # the rank to reduce to; svd only
    dtype: str | None = None  # type that is written; by default float32 for an adapter and the base model's type for merged weights
    trust_remote_code: str | None = None  # the commit whose model code may run; merged only
    scale: float = 1.0  # what the last task's change is multiplied by

    def __post_init__(self) -> None:
        if self.form == "svd" and self.rank is None:
            raise InvalidValue("--form svd needs the rank to reduce to; give it with --rank")
        if self.form != "svd" and self.rank is not None:
            raise InvalidValue(f"--rank is for --form svd, and the form is {self.form}")
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise InvalidValue(f"--scale takes a number of 0 or more, not {self.scale}")
        if self.form != "merged" and self.trust_remote_code is not None:
            raise InvalidValue(f"--trust-remote-code is for --form merged; no model is loaded, and the form is {self.form}")


Made = tuple[Callable[[Path], None], dict[str, Any]]  # what fills a folder, and what `Export` says of it


def refuse_export(to: Path) -> None:
    """Refuse to write an export to a folder that exists already."""
    if to.exists():
        raise InvalidValue(f"{to} exists already; an export is written once, choose another --out")


def export(source: ExportSource, request: Request, *, to: Path, card: Card) -> Export:
    """Export a trained adapter, which is open, to a new folder, with a model card and export.json."""
    refuse_export(to)
    if source.before is None and (modules := modules_of(source.base_model)) is not None:
        source = replace(source, factors=fitted(source.factors, modules, where=str(source.adapter)))
    if request.scale != 1:
        _refuse_to_scale(source)
        before = source.before or NOTHING
        scaled = {name: scaled_change(f, before.get(name), request.scale) for name, f in source.factors.items()}
        source = replace(source, factors=scaled)
    write, facts = (_merge_in_memory if request.form == "merged" else _make_adapter)(source, request)
    license_, datasets = terms(source.adapter, source.base_model)
    result = Export(
        form=request.form,
        asked_rank=request.rank,
        scale=request.scale,
        whole=source.whole.modules,
        source=source.source,
        versions={name: metadata.version(name) for name in PACKAGES},
        license=license_,
        datasets=datasets,
        **facts,
    )
    try:
        with new_folder(to, replace=False) as folder:
            write(folder)
            write_text(folder / EXPORT_FILE, result.as_json())
            write_text(folder / CARD, card(result, source.record))
    except Exception:
        refuse_export(to)  # another process has made it meanwhile
        raise
    return result


def _refuse_to_scale(source: ExportSource) -> None:
    """Refuse to scale what is more than the last task's change."""
    if source.before is None and source.old_adapter is not None:
        raise InvalidValue(
            f"--scale is for the last task's change, and {source.old_adapter}, the adapter before it, is not what it was; put it "
            "back, or leave --scale out"
        )
    if source.before is None and source.whole.tensors:
        raise InvalidValue(
            f"--scale is for factors, and {source.adapter} is one change with its whole weights ({source.whole}); leave --scale out"
        )


def _make_adapter(source: ExportSource, request: Request) -> Made:
    """cat without a rank, svd with one; a rank above the adapter's own would only add zeros."""
    largest, dtype = max(f.rank for f in source.factors.values()), getattr(torch, request.dtype or "float32")
    rank = min(request.rank or largest, largest)
    server_rank, scale = accepted_rank(rank), one_scale(source.factors)
    ours = {layer: _at(f, scale).padded(largest) for layer, f in source.factors.items()}
    goal = {layer: truncated(f, rank) for layer, f in ours.items()} if request.rank else ours
    written = {layer: _round(f, dtype, layer) for layer, f in goal.items()}
    errors = {layer: float(written[layer].since(f).norm()) for layer, f in ours.items()}
    sizes = {layer: float(f.product().norm()) for layer, f in ours.items()}
    layers = [ExportedLayer(module=n, rank=written[n].rank, error=ratio(errors[n], sizes[n])) for n in ours]
    targets, tokenizer = beside(source.adapter, ours, source.base_model)

    def write(folder: Path) -> None:
        transposed, base = bool(read_config(source.adapter).get("fan_in_fan_out")), source.base.loadable
        write_adapter(folder, written, base=base, targets=targets, dtype=dtype, fan_in_fan_out=transposed, whole=source.whole)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    error = ratio(math.hypot(*errors.values()), math.hypot(*sizes.values()))
    kept, stops = _protection(source, written, same=error == 0), unknown_ends(tokenizer, source.base_model)
    facts: dict[str, Any] = {"rank": rank, "max_lora_rank": server_rank, "logits": None}
    facts |= {"tokenizer": tokenizer is not None, "stop_token_ids": stops}
    return write, facts | {"dtype": type_name(dtype), "layers": layers, "error": error, "protection": kept, "base": source.base}


def _at(factors: Factors, scale: float) -> Factors:
    """The same product at another scale: B takes the ratio, in float64; float32 factors of this scale stay as they are."""
    if factors.scale == scale and factors.A.dtype == factors.B.dtype == torch.float32:
        return factors
    return Factors(in_float64(factors.A.detach()), in_float64(factors.B.detach()) * (factors.scale / scale), scale)


def _round(factors: Factors, dtype: torch.dtype, layer: str) -> Factors:
    A, B = factors.A.to(dtype), factors.B.to(dtype)
    if not (A.isfinite().all() and B.isfinite().all()):
        raise InvalidValue(f"the factors of {layer} do not fit in {type_name(dtype)}; choose another --dtype")
    return Factors(A, B, factors.scale)


def _protection(source: ExportSource, written: Mapping[str, Factors], *, same: bool) -> ExportedProtection | None:
    exact = drift_to(source, source.factors)
    if exact is None:
        return None
    served: dict[str, float | None] = dict.fromkeys(SERVED)
    for name in SERVED:
        with suppress(InvalidValue):  # too large for float16: no server computes with it
            served[name] = _rho(source, {n: _round(f, getattr(torch, name), n) for n, f in written.items()})
    return protection(source, exact, exact.rho if same else _rho(source, written), served)


def _rho(source: ExportSource, written: Mapping[str, Factors]) -> float | None:
    """rho of the last task if these were the factors after it."""
    drift = drift_to(source, {n: Factors(f.A.float(), f.B.float(), f.scale) for n, f in written.items()})
    return None if drift is None else drift.rho


def drift_to(source: ExportSource, factors: Mapping[str, Factors]) -> Drift | None:
    """Return the last task's drift, on the directions protected during it, to factors after it; None if there were none."""
    if source.before is None or source.cores is None:
        return None
    return measure(Anchor(layers(source.before, factors, source.cores)))


def protection(
    source: ExportSource, exact: Drift, exported: float | None, served: Mapping[str, float | None] = NOTHING
) -> ExportedProtection:
    """Return rho before and after an export, and as servers round it."""
    task, rho, bound, chance = str(source.source.task), exact.rho, exact.bound, exact.chance
    return ExportedProtection(task=task, rho=rho, rho_exported=exported, bound=bound, chance=chance, served=dict(served))


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 if the whole is 0."""
    return part / whole if whole else 0.0


SEQUENCES, LENGTH = 8, 32  # token sequences on which logits are compared, the same for all exports


def _merge_in_memory(source: ExportSource, request: Request) -> Made:
    """Merge an adapter into its base model, in memory."""
    if source.base_model.model is None:
        raise InvalidValue(f"{source.adapter} names no base model to merge into; give one with --model")
    base_model = asked_for(source.base_model, request.trust_remote_code, where=source.named_in)
    model, tokenizer, sha256 = load_weights(base_model)
    tokenizer = of_adapter(tokenizer, source.adapter, base_model)
    stops = stops_of(model, tokenizer)
    if model.generation_config is not None and set(stops) != set(ends_of(model)):
        model.generation_config.eos_token_id = stops  # where answers end that the adapter was trained on
    mergeable(model, source.factors)
    stored = getattr(torch, request.dtype) if request.dtype else model.dtype
    model.float()  # represents every stored value exactly
    bare = logits_of(model)
    with tempfile.TemporaryDirectory() as temporary:
        adapter = source.adapter
        if request.scale != 1:  # whose files hold the factors as trained
            adapter, transposed = Path(temporary), bool(read_config(source.adapter).get("fan_in_fan_out"))
            write_adapter(adapter, source.factors, base=None, fan_in_fan_out=transposed, whole=source.whole)
        adapted = attach(model, adapter)
    live = logits_of(adapted)
    model = adapted.unload()
    exact = drift_to(source, source.factors)
    past = {"before": source.before, "cores": source.cores} if exact else {"before": NOTHING, "cores": NOTHING}
    roundings = merge(model, source.factors, stored, **past)
    layers = [ExportedLayer(module=name, rank=source.factors[name].rank, error=r.relative) for name, r in roundings.items()]
    error = ratio(math.hypot(*(r.error for r in roundings.values())), math.hypot(*(r.update for r in roundings.values())))
    moved, on_core = (math.hypot(*(getattr(r, name) or 0.0 for r in roundings.values())) for name in ("moved", "on_core"))
    kept = protection(source, exact, on_core / moved if moved else None) if exact else None
    seen = compare_logits(live, logits_of(model), bare)
    _untie(model)
    processing = processing_files(base_model) if model.config.get_text_config() is not model.config else []

    def write(folder: Path) -> None:
        published, model.generation_config = model.generation_config, GenerationConfig()
        model.to(stored).save_pretrained(folder)
        if published is not None:  # transformers saves none of which one field was changed and others conflict
            published.to_json_file(folder / GENERATION_CONFIG_NAME)
        tokenizer.save_pretrained(folder)
        for file in processing:
            shutil.copyfile(file, folder / file.name)

    base = source.base.model_copy(update={"same": _same(source, sha256)})
    facts: dict[str, Any] = {"rank": None, "tokenizer": True, "logits": seen}
    return write, facts | {"dtype": type_name(stored), "layers": layers, "error": error, "protection": kept, "base": base}


def _untie(model: Any) -> None:
    """Mark head and embedding as untied in the configuration if whole weights made them differ; else only one would be written."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(model.config, "tie_word_embeddings", False) and head is not None and not torch.equal(head.weight, embedding.weight):
        model.config.tie_word_embeddings = False


def logits_of(model: Any) -> Tensor:
    """Return logits (sequences, length, vocabulary) on token sequences that depend only on the size of the vocabulary."""
    size = model.get_input_embeddings().num_embeddings
    longest = getattr(model.config, "max_position_embeddings", LENGTH) or LENGTH
    ids = torch.randint(0, size, (SEQUENCES, min(LENGTH, longest)), generator=stream(0, "export/logits"))
    with torch.no_grad():
        return torch.cat([model(input_ids=row[None]).logits.float() for row in ids])


def compare_logits(live: Tensor, written: Tensor, bare: Tensor) -> Logits:
    """Compare logits (sequences, length, vocabulary) of an exported model with those of the adapter on its base model."""
    difference = (written - live).abs()
    return Logits(
        sequences=live.shape[0],
        tokens=live.shape[0] * live.shape[1],
        largest=float(difference.max()),
        mean=float(in_float64(difference).mean()),
        typical=float(in_float64(live - bare).square().mean().sqrt()),
        changed=float(in_float64(written.argmax(-1) != live.argmax(-1)).mean()),
    )


def _same(source: ExportSource, sha256: str | None) -> bool | None:  # weights as those that the run was trained on
    if source.record is None:
        return None
    base = source.record.base_model
    return False if " over " in base.dtype else same_files(base.sha256, sha256)  # a quantized model has other weights
