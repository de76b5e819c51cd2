"""Recognize what lies in a folder: a run, one of its tasks, saved adapters, or a model.

Every command that takes a folder asks here, so all of them take the same things. Files of a run are compared with their hashes
before anything is read from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anchorlora.config import BaseModelSettings, RunConfig, base_model_of, on_model
from anchorlora.errors import InvalidValue
from anchorlora.paths import expanded, nearest
from anchorlora.store.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from anchorlora.store.adapter_config import read_config
from anchorlora.store.record import Record
from anchorlora.store.run_folder import (
    ADAPTER,
    CONFIG_FILE,
    CORES_FILE,
    RunFolder,
    TaskFolder,
    refuse_altered,
    refuse_damaged_adapter,
    spellings,
    task_at,
)
from anchorlora.text import amount

Kind = Literal["run", "task", "adapter", "model"]
# of a model; pickles too, so that whoever reads the weights can say how to convert them
WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Artifact:
    """A folder that a command was given, and what lies in it.

    Args:
        kind: "run" (its last finished task counts), "task" (one task of a run), "adapter" (one or more PEFT adapters of any
            origin), or "model" (full weights).
        folder: The folder, as given.
        adapters: Name -> folder of the adapter; none for a model.
        run: Directory of the run, if there is one, with its configuration, and with its record if it has finished.
        number: Number of the task in the run, from 1.
    """

    kind: Kind
    folder: Path
    adapters: Mapping[str, Path]
    run: RunFolder | None = None
    number: int | None = None

    @property
    def config(self) -> RunConfig | None:
        """Configuration of the run, if there is one."""
        return self.run.config if self.run else None

    @property
    def record(self) -> Record | None:
        """Record of the run, if it has finished."""
        return self.run.record if self.run else None

    @property
    def adapter(self) -> Path:
        """Folder of the adapter.

        Raises:
            InvalidValue: There is none, or more than one.
        """
        if len(self.adapters) == 1:
            return next(iter(self.adapters.values()))
        if not self.adapters:
            raise InvalidValue(f"{self.folder} holds a model's full weights and no adapter; give a run, a task, or an adapter")
        own = "; to give the one in the folder itself, move the others out" if self.folder in self.adapters.values() else ""
        raise InvalidValue(
            f"{self.folder} holds {len(self.adapters)} adapters ({', '.join(self.adapters)}); give one of them, or all as one "
            f"(AdapterStack.save){own}"
        )

    @property
    def task(self) -> str | None:
        """Name of the task, for a run or one of its tasks."""
        return self.config.order[self.number - 1] if self.config and self.number else None

    @property
    def previous(self) -> TaskFolder | None:
        """Folder of the task before, if it has an adapter and cores."""
        if self.run is None or self.config is None or self.number is None or self.number < 2:
            return None
        folder = self.run.task(self.number - 1, self.config.order[self.number - 2])
        return folder if folder.cores.is_file() and folder.adapter.is_dir() else None

    @property
    def cores_before(self) -> Path | None:
        """File of the cores of what came before the task, if its run has one."""
        if self.run is not None and self.run.is_taught:
            file = self.run.skill / "before" / CORES_FILE
            return file if file.is_file() else None
        return self.previous.cores if self.previous else None

    def named_in(self, model: str | None = None) -> str:
        """Return the file or option that names the base model, for messages.

        Args:
            model: Base model from the command line.
        """
        if self.run is not None:
            return str(self.run.config_file)
        return "--model" if model else str(self.folder if self.kind == "model" else self.adapter / ADAPTER_CONFIG)

    def base_model(self, model: str | None = None) -> BaseModelSettings:
        """Return how the base model is loaded.

        Args:
            model: Base model, if another than the folder names.

        Returns:
            Its settings; the field `model` is None where nothing names one.

        Raises:
            InvalidValue: A field is refused; the message names the file.
        """
        if self.config is not None:
            settings = self.config.recipe.base_model
            return settings if model is None else on_model(settings, model)
        if self.kind == "model":
            return base_model_of(self.named_in(model), model=model or str(self.folder))
        fields = read_config(self.adapter)
        named = model or fields.get("base_model_name_or_path")
        revision = fields.get("revision") if model is None and isinstance(fields.get("revision"), str) else None
        return base_model_of(self.named_in(model), model=str(named) if named else None, revision=revision)


def artifact_in(folder: Path) -> Artifact:
    """Return what lies in a folder.

    Args:
        folder: A run directory, the folder of one of its tasks, one or more saved PEFT adapters, or a model's folder or file.

    Raises:
        InvalidValue: The folder holds none of these, its run has finished no task, or a file of a run is not what the run wrote.

    Example:
        >>> tiny().save_pretrained(tmp / "adapter")
        >>> found = artifact_in(tmp / "adapter")
        >>> found.kind, found.adapter.name
        ('adapter', 'adapter')
    """
    folder = expanded(folder)
    if not folder.exists():
        raise InvalidValue(
            f"there is no folder {folder}; give a run directory, one of its tasks, a saved PEFT adapter, or a model"
            f"{nearest(folder)}"
        )
    refuse_altered(folder)
    run = RunFolder(folder)
    if run.is_taught or run.inputs.is_file():  # one without a seal has lost it, or goes on
        run.refuse_damaged_skill()
    refuse_damaged_adapter(folder)
    if folder.is_file() and any(folder.match(pattern) for pattern in WEIGHTS[1:]):
        return Artifact("model", folder, {})
    if run.has_begun:
        return _of_run(folder, RunFolder.open(folder))
    for path in spellings(folder):
        task = task_at(path.parent if path.name == ADAPTER else path)
        if task and task[0].has_begun:
            return _of_run(folder, RunFolder.open(task[0].root), task[1])
    if adapters := adapters_in(folder):
        return Artifact("adapter", folder, adapters)
    if (weights := sorted(folder.glob("adapter_model.*"))) and not (folder / "config.json").is_file():
        raise InvalidValue(
            f"{weights[0]} lies there without its {ADAPTER_CONFIG}, which says what it adapts and at which scale; copy that, too, "
            "from where the adapter was saved"
        )
    if any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return Artifact("model", folder, {})
    raise InvalidValue(
        f"{folder} is neither a run directory ({CONFIG_FILE}), nor a task of one, nor a saved adapter ({ADAPTER_CONFIG}), "
        f"nor a model (config.json, *.safetensors){_meant(folder)}"
    )


def adapters_in(folder: Path) -> dict[str, Path]:
    """Return the adapters that PEFT saved in a folder, by name, without those of checkpoints inside."""
    if not folder.is_dir():
        return {}
    adapters = {"default": folder} if (folder / ADAPTER_CONFIG).is_file() else {}
    inside = [p.parent for p in sorted(folder.glob(f"*/{ADAPTER_CONFIG}")) if not p.parent.name.startswith("checkpoint-")]
    return adapters | {folder.name: folder for folder in inside}


def _of_run(folder: Path, run: RunFolder, number: int | None = None) -> Artifact:
    """One task of a run that is open; the last finished one if none is named."""
    assert run.config is not None
    order = run.config.order
    kind: Kind = "run" if number is None else "task"
    if number is None:
        done = range(1, len(order) + 1) if run.record else [n for n in range(1, len(order) + 1) if run.state(n).is_dir()]
        if not done:
            raise InvalidValue(
                f"the run in {run.root} has finished no task; continue with anchorlora run {run.config_file} --out {run.root}"
            )
        number = done[-1]
    if not 1 <= number <= len(order):
        raise InvalidValue(f"the run in {run.root} has {amount(len(order), 'task')}, so there is no task {number}")
    for earlier, task in enumerate(order[:number], 1) if run.record is None else ():
        refuse_altered(run.task(earlier, task).path)
    adapter = run.task(number, order[number - 1]).adapter
    if run.is_taught:  # the same adapter, with the tokenizer that it was trained with beside it
        run.refuse_damaged_skill()
        adapter = run.adapter
    return Artifact(kind, folder, {"default": adapter}, run, number)


def _meant(folder: Path) -> str:
    """The first folder inside that would have been taken, as the end of a message."""
    inside = (path.parent for name in (CONFIG_FILE, ADAPTER_CONFIG) for path in sorted(folder.glob(f"*/{name}")))
    return next((f"; did you mean {path}?" for path in inside), "")
