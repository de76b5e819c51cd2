"""Two checkpoints on disk, audited: adapters or full weights, whichever they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anchorlora.artifacts import refuse_altered
from anchorlora.experiments.audit_adapters import adapters_in, audit_adapters
from anchorlora.experiments.audit_weights import audit_weights
from anchorlora.experiments.findings import Ask, Findings


def audit(before: Path, after: Path, ask: Ask) -> Findings:
    """What moved from one checkpoint to the other, and what of it is protected.

    Raises ValueError for what does not fit, and for a run's file that is not what the run wrote.
    """
    for place in filter(None, (before, after, ask.cores)):
        refuse_altered(place)
    adapters = [adapters_in(place) for place in (before, after)]
    if all(adapters):
        return audit_adapters(before, after, adapters[0], adapters[1], ask)
    if adapters[1] and (before / "config.json").is_file():  # a model that had no adapter yet
        return audit_adapters(before, after, {}, adapters[1], replace(ask, model=ask.model or str(before)))
    if any(adapters):
        which = (before, after) if adapters[0] else (after, before)
        raise ValueError(
            f"{which[0]} is an adapter and {which[1]} is none; compare two adapters, or merge the adapter into its base first "
            "(merge_and_unload, then save_pretrained)"
        )
    return audit_weights(before, after, ask)
