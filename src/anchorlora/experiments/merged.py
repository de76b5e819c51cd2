"""The merged form of an export: the base's full weights with the update in them, and what the rounding did.

Logits are compared in float32 arithmetic on both sides, so that they tell what the stored weights differ by and nothing else:
the model with the adapter on it, as it was trained, against the weights as they are written.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchorlora import embedded
from anchorlora.adapters import NOTHING, attach, merge, mergeable
from anchorlora.continual.backbone import load_weights
from anchorlora.continual.seeds import stream
from anchorlora.continual.trusting import asked_for
from anchorlora.devices import in_float64
from anchorlora.experiments.export import Made, exact_drift, protection, ratio
from anchorlora.experiments.export_source import Origin
from anchorlora.export_file import Layer, Logits

SEQUENCES, LENGTH = 8, 32  # token sequences on which logits are compared, drawn once for all exports
DTYPES = ("float32", "bfloat16", "float16")


def merged(origin: Origin, dtype: str | None, *, commit: str | None = None) -> Made:
    """The base with the adapter of `origin` merged into it, in memory.

    dtype: of the result, by default the base's own; commit: whose code of the base is run, by default none. Raises ValueError for a
    base that asks for other code.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype takes {', '.join(DTYPES)}, not {dtype!r}")
    if origin.backbone.model is None:
        raise ValueError(f"{origin.adapter} names no base model to merge into; give one with --model")
    backbone = asked_for(origin.backbone, commit, where=origin.named_in)
    model, tokenizer, sha256 = load_weights(backbone, folder=embedded.folder(origin.backbone.model, "backbone"))
    mergeable(model, origin.factors)
    stored = getattr(torch, dtype) if dtype else model.dtype
    model.float()  # holds every value that the base is stored in
    bare = logits_of(model)
    adapted = attach(model, origin.adapter)
    live = logits_of(adapted)
    model = adapted.unload()
    exact = exact_drift(origin)
    past = {"before": origin.before, "cores": origin.cores} if exact else {"before": NOTHING, "cores": NOTHING}
    found = merge(model, origin.factors, stored, **past)
    layers = [Layer(module=name, rank=origin.factors[name].rank, error=each.relative) for name, each in found.items()]
    error = ratio(math.hypot(*(r.error for r in found.values())), math.hypot(*(r.update for r in found.values())))
    moved, on_core = (math.hypot(*(getattr(r, name) or 0.0 for r in found.values())) for name in ("moved", "on_core"))
    kept = protection(origin, exact, on_core / moved if moved else None) if exact else None
    seen = compared(live, logits_of(model), bare)

    def write(place: Path) -> None:
        model.to(stored).save_pretrained(place)
        tokenizer.save_pretrained(place)

    name = str(stored).removeprefix("torch.")
    return Made(write, name, layers, error, kept, logits=seen, same=_same(origin, sha256))


def logits_of(model: Any) -> Tensor:
    """Logits (sequences, length, vocabulary) on token sequences that are the same for every model of a vocabulary's size."""
    size = model.get_input_embeddings().num_embeddings
    longest = getattr(model.config, "max_position_embeddings", LENGTH) or LENGTH
    ids = torch.randint(0, size, (SEQUENCES, min(LENGTH, longest)), generator=stream(0, "export/logits"))
    with torch.no_grad():
        return torch.cat([model(input_ids=row[None]).logits.float() for row in ids])


def compared(live: Tensor, written: Tensor, bare: Tensor) -> Logits:
    """How far the written model's logits are from the live one's; `bare`: the base's, to say what the adapter itself does."""
    difference = (written - live).abs()
    return Logits(
        sequences=live.shape[0],
        tokens=live.shape[0] * live.shape[1],
        largest=float(difference.max()),
        mean=float(in_float64(difference).mean()),
        typical=float(in_float64(live - bare).square().mean().sqrt()),
        changed=float(in_float64(written.argmax(-1) != live.argmax(-1)).mean()),
    )


def _same(origin: Origin, sha256: str | None) -> bool | None:
    """Whether the run was trained on these very weights; hashes of folders and commits of the hub cannot be compared."""
    if origin.record is None:
        return None
    known, quantised = origin.record.backbone.sha256, " over " in origin.record.backbone.dtype
    if quantised:
        return False
    return known == sha256 if known and sha256 and len(known) == len(sha256) else None
