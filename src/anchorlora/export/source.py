"""The source of an export: a run, one of its tasks, or an adapter of any origin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.adapters import WEIGHTS_FILE, read_adapter, read_config
from anchorlora.adapters.files import CONFIG_FILE as ADAPTER_CONFIG
from anchorlora.config import BaseModelSettings, base_model_of, on_model
from anchorlora.embedded import PREFIX
from anchorlora.errors import InvalidValue
from anchorlora.features.files import read_cores
from anchorlora.geometry import Factors, Subspace
from anchorlora.runs.directory import read_config_of_run
from anchorlora.schemas.export import Base, Source
from anchorlora.schemas.record import RECORD_FILE, Record
from anchorlora.schemas.run_folder import CONFIG_FILE, CORES_FILE, adapter_sha256, read_run, refuse_altered, refuse_lost_record
from anchorlora.schemas.text import expanded
from anchorlora.storage.tensors import opened_tensors


@dataclass(frozen=True, eq=False)
class Provenance:
    """An adapter and what is known about it.

    Args:
        adapter: Its folder.
        factors: Its factors, by layer path.
        source: What export.json says of it.
        base_model: How its base model is loaded.
        named_in: The file or option that names the base model.
        base: The base model as others may read of it.
        record: The run's record, if it has finished.
        before: The adapter at the start of the last task, if a run has one.
        cores: The directions protected during the last task, if a run has them.
    """

    adapter: Path
    factors: Mapping[str, Factors]
    source: Source
    base_model: BaseModelSettings
    named_in: str
    base: Base
    record: Record | None = None
    before: Mapping[str, Factors] | None = None
    cores: Mapping[str, Subspace] | None = None


def origin_of(folder: Path, *, model: str | None = None) -> Provenance:
    """Return what lies in a folder: a run (its last finished task), one of its tasks, or a saved adapter.

    Args:
        folder: The folder.
        model: The base model, if another than the run or the adapter names.

    Raises:
        InvalidValue: If there is nothing to export, or a file is not what was written.
    """
    folder = expanded(folder).resolve()
    if not folder.is_dir():
        raise InvalidValue(f"there is no folder {folder}; give a run directory, one of its tasks, or a saved PEFT adapter")
    refuse_altered(folder)
    if (folder / CONFIG_FILE).is_file():
        return _of_run(folder, _last_task(folder), model)
    task = folder.parent if folder.name == "adapter" else folder
    if re.fullmatch(r"\d+-.+", task.name) and task.parent.name == "tasks" and (task.parent.parent / CONFIG_FILE).is_file():
        return _of_run(task.parent.parent, int(task.name.split("-")[0]), model)
    if (folder / "adapter" / ADAPTER_CONFIG).is_file():
        return _of_adapter(folder / "adapter", model)
    if not (folder / ADAPTER_CONFIG).is_file():
        if any(folder.glob("*.safetensors*")) or any(folder.glob("pytorch_model*.bin*")):
            raise InvalidValue(f"{folder} holds a model's full weights, no adapter; export takes adapters")
        raise InvalidValue(
            f"{folder} is neither a run directory ({CONFIG_FILE}), nor a task of one, nor a saved adapter ({ADAPTER_CONFIG})"
        )
    return _of_adapter(folder, model)


def _last_task(run: Path) -> int:
    order = read_config_of_run(run / CONFIG_FILE).order
    refuse_lost_record(run)
    if (run / RECORD_FILE).is_file():
        return len(order)
    done = [n for n in range(1, len(order) + 1) if (run / "state" / str(n)).is_dir()]
    if not done:
        raise InvalidValue(f"the run in {run} has finished no task; go on with anchorlora run {run / CONFIG_FILE} --out {run}")
    return done[-1]


def _of_run(run: Path, number: int, model: str | None) -> Provenance:
    record = read_run(run) if (run / RECORD_FILE).is_file() else None
    config = read_config_of_run(run / CONFIG_FILE)
    if not 1 <= number <= len(config.order):
        raise InvalidValue(f"the run in {run} has {len(config.order)} tasks, so there is no task {number}")
    folders = [run / "tasks" / f"{n}-{task}" for n, task in enumerate(config.order, 1)]
    for folder in folders[:number] if record is None else []:
        refuse_altered(folder)
    adapter = folders[number - 1] / "adapter"
    factors = read_adapter(adapter)
    settings = config.recipe.base_model
    revision = record.base_model.revision if record else settings.revision
    if model is not None:
        settings, revision = on_model(settings, model, quantized=None), None
    place: dict[str, Any] = {
        "number": number,
        "task": config.order[number - 1],
        "tasks": len(config.order),
        "finished": record is not None,
    }
    source = Source(kind="run", **place, **_contents(adapter))
    from_hub = revision is not None or record is None or model is not None
    base = _base(settings.model, revision, from_hub=from_hub)
    past: Path | None = folders[number - 2] if number > 1 else None
    if past is None or not (past / CORES_FILE).is_file() or not (past / "adapter").is_dir():
        return Provenance(adapter, factors, source, settings, str(run / CONFIG_FILE), base, record)
    before, cores = read_adapter(past / "adapter"), read_cores(past / CORES_FILE)
    return Provenance(adapter, factors, source, settings, str(run / CONFIG_FILE), base, record, before, cores)


def _of_adapter(folder: Path, model: str | None) -> Provenance:
    factors = read_adapter(folder)
    config = read_config(folder)
    named = model or config.get("base_model_name_or_path")
    revision = config.get("revision") if model is None and isinstance(config.get("revision"), str) else None
    where = "--model" if model else str(folder / ADAPTER_CONFIG)
    settings = base_model_of(where, model=str(named) if named else None, revision=revision)
    source = Source(kind="adapter", number=None, task=None, tasks=None, finished=None, **_contents(folder))
    return Provenance(folder, factors, source, settings, where, _base(settings.model, revision, from_hub=True))


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
