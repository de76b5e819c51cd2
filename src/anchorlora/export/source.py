"""The source of an export: a run, one of its tasks, or an adapter of any origin, with what is at hand of its base model.

What is read of the base model and the source's own folder stops no export: what is not at hand stays out, and the command says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from anchorlora import embedded
from anchorlora.adapters import read_adapter
from anchorlora.adapters.files import fitted, read_with_whole
from anchorlora.adapters.targets import named
from anchorlora.adapters.whole import NO_WHOLE, WholeWeights
from anchorlora.config import BaseModelSettings
from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.features.files import read_cores
from anchorlora.geometry import Factors, Subspace
from anchorlora.models.hub import cached_folder, is_path
from anchorlora.models.load import module_names, stops_beyond, tokenizer_of
from anchorlora.models.trust import refuse_foreign
from anchorlora.paths import expanded
from anchorlora.store.adapter_config import WEIGHTS_FILE, adapter_sha256, read_config, refuse_replicated
from anchorlora.store.artifact import artifact_in
from anchorlora.store.export import Base, Source
from anchorlora.store.record import Record
from anchorlora.store.seal import sha256
from anchorlora.store.tensors import opened_tensors

CARD = "README.md"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*", re.ASCII)
SEES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")  # what servers of such a model read
CHOOSES = ("exclude_modules", "layers_to_transform", "layers_pattern")  # fields by which PEFT leaves some matching layers out


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
    config, record = artifact.config, artifact.record
    tasks, finished = (None, None) if config is None else (len(config.order), record is not None)
    progress = {"number": artifact.number, "task": artifact.task, "tasks": tasks, "finished": finished}
    source = Source(kind="adapter" if config is None else "run", **(progress | _contents(adapter)))
    revision = record.base_model.revision if record and model is None else settings.revision
    base = _base(settings.model, revision, from_hub=revision is not None or record is None or model is not None)
    facts: dict[str, Any] = {"adapter": adapter, "factors": factors, "whole": whole, "named_in": artifact.named_in(model)}
    facts |= {"source": source, "base_model": settings, "base": base, "record": record}
    if config and artifact.number == 1 and (old := config.recipe.start.old_adapter) is not None:
        return ExportSource(**facts, old_adapter=Path(old), before=_before_the_run(expanded(old), record, factors))
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
    if model is None or model.startswith(embedded.PREFIX):
        return Base(name=model, hub=None, revision=None)
    on_hub = from_hub and HUB_NAME.fullmatch(model) and not Path(model).exists() and model[0] not in ".-"
    return Base(name=model if on_hub else expanded(model).resolve().name, hub=model if on_hub else None, revision=revision)


def beside(adapter: Path, layers: Iterable[str], base_model: BaseModelSettings) -> tuple[list[str], Any]:
    """Return what is written beside an adapter: `target_modules`, and the tokenizer of the source's folder, else the base model's,
    else None.

    `target_modules` are the last parts of the layers' names if these select the same layers of the base model, else the source's
    own names, else whole paths.
    """
    targets, tokenizer = _targets(sorted(layers), modules_of(base_model), adapter), _at_hand(lambda: tokenizer_in(adapter))
    return targets, _read_base(base_model, tokenizer_of) if tokenizer is None else tokenizer


def unknown_ends(tokenizer: Any, base_model: BaseModelSettings) -> list[int]:
    """Return the tokens at which a chat template ends answers and servers of the base model do not stop."""
    if tokenizer is None or not tokenizer.chat_template:
        return []
    return _read_base(base_model, partial(stops_beyond, tokenizer)) or []


def modules_of(base_model: BaseModelSettings) -> list[str] | None:
    """Return the paths of the base model's modules; None if it is not at hand."""
    return _read_base(base_model, module_names)


def _read_base(base_model: BaseModelSettings, read: Callable[..., Any]) -> Any:
    """Return what is read of the base model, none of whose code runs; None where it is not at hand."""
    revision = base_model.trust_remote_code or base_model.revision
    settings = base_model.model_copy(update={"trust_remote_code": None, "revision": revision})
    known, folder = _locate(settings)
    return _at_hand(lambda: read(settings, folder=folder)) if known else None


def processing_files(base_model: BaseModelSettings) -> list[Path]:
    """Return the files of the base model that say how images and sound become its inputs."""
    files, revision = list[Path](), base_model.trust_remote_code or base_model.revision
    for name in SEES if base_model.model is not None else ():
        with suppress(OSError):  # it has none, or the hub does not answer
            files.append(Path(str(cached_file(str(_locate(base_model)[1] or base_model.model), name, revision=revision))))
    return files


def terms(adapter: Path, base_model: BaseModelSettings) -> tuple[str | None, list[str]]:
    """Return the license that the source's card names, or else the base model's, and the data sets that the source's card names."""
    card = _metadata(adapter)
    licenses, datasets = (card.get("license"), _metadata(_locate(base_model)[1]).get("license")), card.get("datasets")
    return (
        next((name for name in licenses if isinstance(name, str) and LICENSE.fullmatch(name)), None),
        [name for name in datasets if isinstance(name, str) and HUB_NAME.fullmatch(name)] if isinstance(datasets, list) else [],
    )


def _targets(layers: list[str], names: list[str] | None, adapter: Path) -> list[str]:
    short = sorted({layer.rpartition(".")[2] for layer in layers})
    if names is not None:
        return short if sorted(name for name in names if named(name, short)) == layers else layers
    config = read_config(adapter)
    modules = config.get("target_modules")
    if isinstance(modules, list) and not any(config.get(name) for name in CHOOSES) and all(named(n, modules) for n in layers):
        return modules  # PEFT adapted every layer that they select, and these are all
    return layers


def _locate(settings: BaseModelSettings) -> tuple[bool, Path | None]:
    """Return whether the base model can be read, and its folder; None if it is read from the hub."""
    if settings.model is None:
        return False, None
    if is_path(settings.model):
        folder = expanded(settings.model)
        return folder.is_dir(), folder
    try:
        return True, embedded.folder(settings.model, "base_model") or cached_folder(settings)
    except (InvalidValue, UnknownName):  # the hub does not answer
        return False, None


def tokenizer_in(folder: Path) -> Any:
    """Return the tokenizer that lies beside an adapter; None where there is none."""
    if not any(folder.glob("tokenizer*")):
        return None
    refuse_foreign(folder, code=False)
    return tokenizer_of(BaseModelSettings(model=str(folder)), folder=folder)


def _metadata(folder: Path | None) -> dict[str, Any]:
    """Front matter of the card in a folder."""
    from huggingface_hub.repocard import metadata_load

    if folder is None or not (folder / CARD).is_file():
        return {}
    try:
        return metadata_load(folder / CARD) or {}
    except Exception:  # somebody's YAML
        return {}


def _at_hand(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except InvalidValue:
        return None
