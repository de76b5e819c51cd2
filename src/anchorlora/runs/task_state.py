"""Files of a finished task: for later tasks, and for whoever reads its predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anchorlora.continual.callback import TaskState
from anchorlora.continual.past import Past
from anchorlora.errors import InvalidValue
from anchorlora.features.files import basis_in, read_cores, read_tensors
from anchorlora.features.store import LayerCore
from anchorlora.store.files import write_text
from anchorlora.store.json import checked
from anchorlora.store.record import LayerFacts
from anchorlora.store.seal import read_facts
from anchorlora.store.tensors import write_tensors

REMEMBERED = "remembered.safetensors"
REMEDY = "delete the state of this task and of later ones; they are trained again"


def write_boundary(folder: Path, state: TaskState) -> None:
    """Write what later tasks need: feature rows, wide bases, and what constraints and the adapter plan keep."""
    # layers that share their rows share the basis, unless a constraint has made cores of its own
    first = {id(core.wide): layer for layer, core in reversed(state.cores.items())}
    wides = {layer: core.wide.basis for layer, core in state.cores.items() if first[id(core.wide)] == layer}
    rows = {f"rows/{name}": t for name, t in state.rows.items()}
    for kind, tensors in (("rows", rows), ("wide", wides), ("remembered", state.remembered), ("stack", state.stack)):
        write_tensors(folder / f"{kind}.safetensors", tensors)
    write_text(folder / "stores.json", json.dumps(state.stores))


def read_boundary(past: Past, state: Path, cores_file: Path, facts: Sequence[dict[str, Any]]) -> None:
    """Append one finished task to the past."""
    stores = past.rows.stores = read_facts(state / "stores.json", dict[str, str])
    rows = {name.removeprefix("rows/"): t for name, t in read_tensors(state / "rows.safetensors").items()}
    cores = read_cores(cores_file)
    file = state / "wide.safetensors"
    wides = {store: basis_in(t, f"{file}: the basis of {store!r:.80}") for store, t in read_tensors(file).items()}
    layers = {layer.module: layer for layer in checked(list(facts), list[LayerFacts], where=str(state), remedy=REMEDY)}
    if not (stores.keys() <= cores.keys() and stores.keys() <= layers.keys() and set(stores.values()) <= wides.keys()):
        raise InvalidValue(f"{state} and {cores_file} are not of the same layers; {REMEDY}")
    widths = {store: cores[path].d for path, store in stores.items()}
    for name, t in rows.items():
        width = widths.get(name.partition("/")[2])
        if t.ndim != 2 or t.shape[1] != width or t.dtype != torch.float32:
            raise InvalidValue(f"{state}: {name} is {t.dtype} {tuple(t.shape)}, no rows of width {width}; {REMEDY}")
    past.rows.restore_task(rows)
    made = {
        path: LayerCore(
            cores[path], wides.get(path, wides[store]), layers[path].k_star, layers[path].retained_energy, layers[path].rows
        )
        for path, store in stores.items()
    }
    past.append(made, read_tensors(state / REMEMBERED))


def predictions(state: TaskState) -> list[dict[str, Any]]:
    """Return the lines of a task's predictions.jsonl."""
    return [
        {
            "task": task,
            "index": encoded.example.index,
            "prompt_sha256": encoded.prompt_sha256,
            "text": answer.text,
            "label": answer.label,
            "gold": answer.gold,
            "metrics": dict(answer.scores),
        }
        for task, pairs in state.predictions.items()
        for encoded, answer in pairs
    ]
