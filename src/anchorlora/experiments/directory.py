"""A run directory: what CONTRACT.md promises outside, and what a stopped run needs to go on.

    config.yaml, log.jsonl, tasks/<t>-<task>/{adapter,cores.safetensors,predictions.jsonl}, state/<t>/, record.json last

A task's folder and then its state are renamed into place when they are whole. A run goes on after the last task that has a
state; what a later, unfinished task left is written again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from anchorlora.adapters import CONFIG_FILE as ADAPTER_CONFIG
from anchorlora.adapters import WEIGHTS_FILE, read_adapter, write_adapter
from anchorlora.continual.past import Past
from anchorlora.continual.recipe import Cell, Features, differences, explained
from anchorlora.continual.sequence import Stage
from anchorlora.experiments.cores import read_cores, read_tensors, write_cores
from anchorlora.experiments.files import dump_yaml, load_yaml, new_folder, write_lines, write_text
from anchorlora.experiments.midway import Midway
from anchorlora.experiments.sealed import damage, sealed_folder
from anchorlora.features import LayerCore
from anchorlora.geometry import Factors, Subspace
from anchorlora.record import RECORD_FILE, Record, SiteFacts

CONFIG_FILE, LOG_FILE, TRACE_FILE, CORES_FILE = "config.yaml", "log.jsonl", "trace.jsonl", "cores.safetensors"
FACTS_FILE, SITES_FILE = "facts.json", "sites.json"


@dataclass(frozen=True)
class StageFacts:
    """The numbers of a finished task that its record will need."""

    number: int
    task: str
    accuracy: list[float]
    illegal: list[float]
    drift: dict[str, Any] | None
    sites: list[dict[str, Any]]
    train_seconds: float
    evaluate_seconds: float
    trained_parameters: int
    stored_parameters: int
    history_bytes: int
    peak_memory_bytes: int


@dataclass(frozen=True)
class RunDirectory:
    root: Path

    @property
    def record(self) -> Path:
        return self.root / RECORD_FILE

    @property
    def trace(self) -> Path:
        return self.root / TRACE_FILE

    def claim(self, cell: Cell) -> None:
        """Make the directory this cell's, or find that it is already.  Touches nothing when it belongs to another."""
        config = self.root / CONFIG_FILE
        if config.exists():
            changed = differences(read_cell(config), cell)
            if changed:
                raise ValueError(
                    f"{self.root} belongs to another configuration ({'; '.join(changed[:3])}"
                    f"{f'; and {len(changed) - 3} more' if len(changed) > 3 else ''}); choose another --out"
                )
            return
        if self.root.exists() and any(self.root.iterdir()):
            raise ValueError(f"{self.root} is not empty and is no run directory (no {CONFIG_FILE}); choose another --out")
        self.root.mkdir(parents=True, exist_ok=True)
        write_text(config, dump_yaml(cell.model_dump(mode="json")))

    def finished_tasks(self, order: Sequence[str], tell: Callable[[str], None] = lambda sentence: None) -> list[StageFacts]:
        """The facts of the tasks that are done, in order, up to the first whose files are not what was written.

        tell: is given what is wrong with that one; it and what came after it are learned again.
        """
        facts: list[StageFacts] = []
        for number, task in enumerate(order, 1):
            state = self._state(number)
            if not state.is_dir():
                break
            wrong = damage(state, beside=self._beside(number, task))
            if wrong:
                tell(f"{wrong}; task {number} is learned again")
                break
            facts.append(StageFacts(**json.loads((state / FACTS_FILE).read_text())))
        return facts

    def write_stage(self, stage: Stage, *, base: str, peak_memory_bytes: int) -> StageFacts:
        """Save a finished task: first what the outside reads, then the state that makes it count."""
        stored = sum(f.A.numel() + f.B.numel() for f in stage.factors.values())
        facts = StageFacts(
            stage.number,
            stage.task,
            stage.accuracy,
            stage.illegal,
            stage.drift,
            site_facts(stage.cores),
            stage.train_seconds,
            stage.evaluate_seconds,
            stage.trained_parameters,
            stored,
            stage.history_bytes,
            peak_memory_bytes,
        )
        with new_folder(self._task(stage.number, stage.task)) as folder:
            write_adapter(folder / "adapter", stage.factors, base=base)
            write_cores(folder / CORES_FILE, {layer: c.core for layer, c in stage.cores.items()}, stage.stores)
            write_lines(folder / "predictions.jsonl", predictions(stage))
        with sealed_folder(self._state(stage.number), beside=self._beside(stage.number, stage.task)) as folder:
            write_boundary(folder, stage)
            write_text(folder / FACTS_FILE, json.dumps(vars(facts), allow_nan=False))
        self.midway(stage.number).clear()
        return facts

    def restore(self, facts: Sequence[StageFacts], settings: Features) -> tuple[Past, dict[str, Factors], dict[str, Tensor]]:
        """What a run needs to go on after the tasks of `facts`: past, factors, and what the plan of blocks kept."""
        past = Past.empty(settings)
        for fact in facts:
            read_boundary(past, self._state(fact.number), self._task(fact.number, fact.task) / CORES_FILE, fact.sites)
        last = facts[-1]
        stack = read_tensors(self._state(last.number) / "stack.safetensors")
        return past, read_adapter(self._task(last.number, last.task) / "adapter"), stack

    def write_sites(self, folder: Path, stage: Stage) -> None:
        write_text(folder / SITES_FILE, json.dumps(site_facts(stage.cores)))

    def restore_learned(self, past: Past, number: int) -> tuple[Past, dict[str, Factors], dict[str, Tensor]]:
        """The same as `restore`, for a task that is learned and not answered, behind the finished ones in `past`."""
        folder = self.midway(number).learned
        read_boundary(past, folder, folder / CORES_FILE, json.loads((folder / SITES_FILE).read_text()))
        return past, read_adapter(folder / "adapter"), read_tensors(folder / "stack.safetensors")

    def midway(self, number: int) -> Midway:
        """Where the state of a task is kept that has begun and not ended."""
        return Midway(self.root / "state" / f"{number}-begun")

    def write_record(self, record: Record) -> None:
        if self.record.exists():
            raise ValueError(f"{self.record} exists already; a record is written once")
        write_text(self.record, record.as_json())

    def log(self, event: dict[str, Any]) -> None:
        with (self.root / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def trim_logs(self, finished: int, step: int = 0) -> None:
        """Drop what was logged and traced of tasks that will be learned again; `step` steps of the one after `finished` stay."""

        def stays(event: dict[str, Any]) -> bool:
            task = event.get("task", 0)
            return task <= finished or (task == finished + 1 and step > 0 and event.get("step", 0) <= step)

        for path in (self.root / LOG_FILE, self.trace):
            if path.is_file():
                events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
                write_lines(path, [event for event in events if stays(event)])

    def fingerprint(self, number: int, task: str) -> str:
        """SHA-256 over a finished task's adapter and cores."""
        total = hashlib.sha256()
        for path in (self._task(number, task) / "adapter" / WEIGHTS_FILE, self._task(number, task) / CORES_FILE):
            total.update(hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()

    def take_over(self, other: RunDirectory, number: int, task: str) -> None:
        """Begin with a finished task of another run: its folder first, then the state that makes it count."""
        for ours, theirs in ((self._task(number, task), other._task(number, task)), (self._state(number), other._state(number))):
            if not ours.exists():
                with new_folder(ours) as folder:
                    shutil.copytree(theirs, folder, dirs_exist_ok=True)

    def _beside(self, number: int, task: str) -> dict[str, Path]:
        """The files of a task's own folder that a resumed run reads."""
        folder = self._task(number, task)
        return {name: folder / name for name in (f"adapter/{ADAPTER_CONFIG}", f"adapter/{WEIGHTS_FILE}", CORES_FILE)}

    def _task(self, number: int, task: str) -> Path:
        return self.root / "tasks" / f"{number}-{task}"

    def _state(self, number: int) -> Path:
        return self.root / "state" / str(number)


def read_cell(path: Path) -> Cell:
    """A complete configuration.  Raises ValueError with the field for anything unknown or wrong."""
    content = load_yaml(path)
    try:
        return Cell.model_validate(content)
    except ValidationError as error:
        raise explained(error, str(path)) from None


def write_boundary(folder: Path, stage: Stage) -> None:
    """What a task leaves for later ones: its feature rows, wide bases, what constraints and the plan of blocks keep."""
    wides = {store: stage.cores[store].wide.basis for store in set(stage.stores.values())}
    save_file({f"rows/{name}": t.contiguous() for name, t in stage.rows.items()}, folder / "rows.safetensors")
    save_file({store: wide.contiguous() for store, wide in wides.items()}, folder / "wide.safetensors")
    for kind, tensors in (("remembered", stage.remembered), ("stack", stage.stack)):
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, folder / f"{kind}.safetensors")
    write_text(folder / "stores.json", json.dumps(stage.stores))


def read_boundary(past: Past, state: Path, cores_file: Path, facts: Sequence[dict[str, Any]]) -> None:
    """Append one finished task to the past."""
    past.rows.stores = json.loads((state / "stores.json").read_text())
    past.rows.restore_task({name.removeprefix("rows/"): t for name, t in read_tensors(state / "rows.safetensors").items()})
    cores = read_cores(cores_file)
    wides = {store: Subspace(t) for store, t in read_tensors(state / "wide.safetensors").items()}
    sites = {site["module"]: SiteFacts(**site) for site in facts}
    past.boundaries.append(
        {
            layer: LayerCore(cores[layer], wides[store], sites[layer].k_star, sites[layer].retained_energy, sites[layer].rows)
            for layer, store in past.rows.stores.items()
        }
    )
    past.remembered = read_tensors(state / "remembered.safetensors")


def site_facts(cores: dict[str, LayerCore]) -> list[dict[str, Any]]:
    return [
        {"module": layer, "k": c.core.k, "k_star": c.k_star, "retained_energy": c.retained_energy, "rows": c.rows}
        for layer, c in cores.items()
    ]


def predictions(stage: Stage) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "index": encoded.example.index,
            "prompt_sha256": encoded.prompt_sha256,
            "text": answer.text,
            "label": answer.label,
            "gold": answer.gold,
        }
        for task, pairs in stage.answers.items()
        for encoded, answer in pairs
    ]
