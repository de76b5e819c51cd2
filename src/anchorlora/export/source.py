"""The source of an export: a run, one of its tasks, or an adapter of any origin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.adapters import read_adapter
from anchorlora.adapters.files import fitted, read_with_whole
from anchorlora.adapters.whole import NO_WHOLE, WholeWeights
from anchorlora.config import BaseModelSettings
from anchorlora.embedded import PREFIX
from anchorlora.features.files import read_cores
from anchorlora.geometry import Factors, Subspace
from anchorlora.paths import expanded
from anchorlora.store.adapter_config import WEIGHTS_FILE, adapter_sha256, refuse_replicated
from anchorlora.store.artifact import artifact_in
from anchorlora.store.export import Base, Source
from anchorlora.store.record import Record
from anchorlora.store.seal import sha256
from anchorlora.store.tensors import opened_tensors


@dataclass(frozen=True, eq=False)
class ExportSource:
    """An adapter and what is known about it."""

    adapter: Path
    factors: Mapping[str, Factors]  # its factors, by layer path
    source: Source  # what export.json says of it
    base_model: BaseModelSettings  # how its base model is loaded
    named_in: str  # the file or option that names the base model
    base: Base  # the base model as others may read of it
    record: Record | None = None  # the run's record, if it has finished
    before: Mapping[str, Factors] | None = None  # the adapter at the start of the last task, if a run has one
    whole: WholeWeights = NO_WHOLE  # what comes with the adapter
    old_adapter: Path | None = None  # what the run went on from, if the last task is its first
    cores: Mapping[str, Subspace] | None = None  # the directions protected during the last task, if a run has them


def export_source(folder: Path, *, model: str | None = None) -> ExportSource:
    """Return what is exported from a folder: a run (its last finished task), one of its tasks, or a saved adapter."""
    artifact = artifact_in(expanded(folder).resolve())
    adapter, settings = artifact.adapter, artifact.base_model(model)
    if model is not None:
        settings = settings.model_copy(update={"quantized": None})
    refuse_replicated(adapter)
    factors, whole = read_with_whole(adapter)
    facts: dict[str, Any] = {"adapter": adapter, "factors": factors, "whole": whole, "named_in": artifact.named_in(model)}
    if artifact.config is None:
        source = Source(kind="adapter", number=None, task=None, tasks=None, finished=None, **_contents(adapter))
        base = _base(settings.model, settings.revision, from_hub=True)
        return ExportSource(**facts, source=source, base_model=settings, base=base)
    tasks, finished = len(artifact.config.order), artifact.record is not None
    progress = {"number": artifact.number, "task": artifact.task, "tasks": tasks, "finished": finished}
    source = Source(kind="run", **(progress | _contents(adapter)))
    revision = artifact.record.base_model.revision if artifact.record and model is None else settings.revision
    base = _base(settings.model, revision, from_hub=revision is not None or artifact.record is None or model is not None)
    facts |= {"source": source, "base_model": settings, "base": base, "record": artifact.record}
    if artifact.number == 1 and (old := artifact.config.recipe.start.old_adapter) is not None:
        return ExportSource(**facts, old_adapter=Path(old), before=_before_the_run(expanded(old), artifact.record, factors))
    if (past := artifact.previous) is None:
        return ExportSource(**facts)
    return ExportSource(**facts, before=read_adapter(past.adapter, beside={}), cores=read_cores(past.cores))


def _before_the_run(adapter: Path, record: Record | None, factors: Mapping[str, Factors]) -> Mapping[str, Factors] | None:
    """The factors of the adapter that a run went on from; None where it is not at hand or not the same any more."""
    weights = adapter / WEIGHTS_FILE
    if not weights.is_file() or (record is not None and record.protocol.get("start", {}).get("old_adapter") != sha256(weights)):
        return None
    return fitted(read_adapter(adapter, beside={}), factors, where=str(adapter))


def _contents(adapter: Path) -> dict[str, Any]:
    """Hash of an adapter's two files, and the types that its factors are stored in."""
    with opened_tensors(adapter / WEIGHTS_FILE) as file:
        dtypes = {str(file.get_slice(key).get_dtype()) for key in file.keys()}  # noqa: SIM118  # a file handle, not a dict
    return {"adapter_sha256": adapter_sha256(adapter), "dtype": ", ".join(sorted(dtypes))}


def _base(model: str | None, revision: str | None, *, from_hub: bool) -> Base:
    """The base model as others may see it: a local folder only by its last name."""
    if model is None or model.startswith(PREFIX):
        return Base(name=model, hub=None, revision=None)
    on_hub = from_hub and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model, re.ASCII) and not Path(model).exists() and model[0] not in ".-"
    return Base(name=model if on_hub else expanded(model).resolve().name, hub=model if on_hub else None, revision=revision)
