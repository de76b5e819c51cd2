"""Things that a skill must keep: their text, what is held out to measure them, and the cores of earlier skills."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchorlora.adapters import lora_layers
from anchorlora.data import Encoder, Sample, read_samples, samples_of
from anchorlora.data.holdout import RowHashes
from anchorlora.data.rows import row_of
from anchorlora.data.text import count_rows
from anchorlora.errors import InvalidValue
from anchorlora.features import read_cores, write_cores
from anchorlora.features.files import first_layers, read_origin, read_tensors
from anchorlora.geometry import JoinedCore, LayerCore, in_float32
from anchorlora.scores import MOST_PROBES
from anchorlora.store.files import load_yaml
from anchorlora.store.json import read_file, read_json, text_of
from anchorlora.store.run_folder import SKILL, RunFolder
from anchorlora.store.tensors import opened_tensors, write_tensors
from anchorlora.text import shown
from anchorlora.train.request import CORES, MEMORY, OLD_TEXT, SELF, UNREAD, name_of_data, stem_of

PROBES, ENERGIES, CAPACITY = "probes", "energies.safetensors", "capacity.json"
ROWS = "rows.json"  # how many rows of each source of text are learned, kept, cut and left out
MOST_ROWS = 10_000  # of a kept file, which cores are made from
SHARE = 5  # every fifth row of what is kept is held out to measure
OWN_SHARE = 3  # of what the model writes, which takes time, every third


@dataclass(eq=False)
class Kept:
    """Something that is kept."""

    name: str
    source: str  # where it comes from, in words
    samples: list[Sample] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)  # rows to measure by
    cores: Mapping[str, JoinedCore] | None = None  # the joined cores of an earlier skill and of all that it kept
    memory: Mapping[str, Tensor] | None = None
    unread: list[Sample] = field(default_factory=list)  # of a skill, whose answers the memory does not know yet
    old_text: list[dict[str, Any]] = field(default_factory=list)  # rows that an earlier skill trained on again, and of its own
    facts: dict[str, Any] = field(default_factory=dict)


def read_kept(source: str, columns: str | None, unfit: Mapping[str, Collection[int]]) -> list[Kept]:
    """Return what a source of `--keep` or `--after` stands for: one thing, or an earlier skill and all that it kept."""
    if source == SELF:
        return [Kept(SELF, SELF)]
    skill = Path(source) / SKILL
    if not skill.is_dir():
        name = name_of_data(source)
        samples, probes = hold_out(source, _samples(source, columns, MOST_ROWS), unfit=unfit.get(name, ()))
        return [Kept(name, source, samples, probes, facts={"title": shown(stem_of(source))})]
    RunFolder(Path(source)).refuse_damaged_skill()
    left_cores = (skill / "after" / CORES).is_file()  # a method with a memory leaves that instead
    origin = read_origin(skill / "after" / CORES) if left_cores else {}
    files = _probes_of(skill)
    left = skill / "after" / MEMORY
    memory = read_tensors(left) if left.is_file() else None
    old_text = _rows_left(skill, OLD_TEXT)
    learned = [(source, row) for row in _rows_left(skill, UNREAD)]
    unread = samples_of(learned, source=source, mixed=True) if learned else []
    cores = joined_cores_in(skill / "after") if left_cores else None
    titles = _titles(skill)
    return [
        Kept(
            file.stem,
            source,
            probes=[row for number, row in enumerate(rows_of_file(file)) if number not in unfit.get(file.stem, ())],
            cores=cores,
            memory=memory,
            unread=unread if file.parent.parent.name == "after" else [],
            old_text=old_text if file == files[0] else [],  # of all that the run kept
            facts=origin | {"title": titles.get(file.stem)},
        )
        for file in files
    ]


def _rows_left(skill: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a file that a skill may have left."""
    file = skill / "after" / name
    return rows_of_file(file) if file.is_file() else []


def _titles(skill: Path) -> dict[str, str | None]:
    """Titles of an earlier skill, and of each thing that it kept, by name."""
    request = load_yaml(skill / "request.yaml")
    facts = read_file(skill / "before/facts.json", dict[str, Any], remedy="train that skill again, with another --out")
    return {kept["name"]: kept.get("title") for kept in facts["kept"]} | {request["name"]: request.get("title")}


def count_kept(source: str, columns: str | None, encoder: Encoder, learned: RowHashes) -> list[dict[str, Any]]:
    """Return how many rows a source of `--keep` or `--after` has of each thing in it, and how many of them have each property;
    `also_learned` counts those that measure it and are trained on now.
    """
    if source == SELF:
        return []
    skill = Path(source) / SKILL
    if skill.is_dir():
        parts = []
        for file in _probes_of(skill):
            rows = [(f"{file}, line {n}", row) for n, row in enumerate(rows_of_file(file), 1)]
            samples = samples_of(rows, source=str(file), mixed=True)
            counts, unfit = count_rows(file.stem, samples, encoder, measured=True)
            if len(unfit) == len(samples):
                raise _no_probes(next(iter(unfit.values())), len(samples))
            held = len(samples) - len(unfit)
            counts["also_learned"] = learned.shared_with(s for n, s in enumerate(samples) if n not in unfit)
            parts.append({"name": file.stem, "source": source, "use": "measured", **counts, "held_out": held, "unfit": [*unfit]})
        return parts
    samples = _samples(source, columns, MOST_ROWS + 1)
    more, samples = len(samples) > MOST_ROWS, samples[:MOST_ROWS]
    counts, unfit = count_rows(source, samples, encoder, measured=True)
    _, probes = hold_out(source, samples, unfit=unfit)
    if not probes:
        raise _no_probes(next(iter(unfit.values())), len(samples))
    measured = samples_of(((source, row) for row in probes), source=source, mixed=True)
    counts |= {"held_out": len(probes), "more": more, "unfit": [*unfit], "also_learned": learned.shared_with(measured)}
    return [{"name": name_of_data(source), "source": source, "use": "kept", **counts}]


def _samples(source: str, columns: str | None, limit: int) -> list[Sample]:
    """Rows of kept text, whose columns have an option of their own."""
    try:
        return read_samples(source, column=columns, limit=limit)
    except InvalidValue as error:
        raise InvalidValue(str(error).replace("with --columns", "with --keep-columns")) from error


def _no_probes(first: str, rows: int) -> InvalidValue:
    return InvalidValue(f"{first}; without it none of {rows} rows can measure what is kept")


def _probes_of(skill: Path) -> list[Path]:
    return sorted(file for stage in ("before", "after") for file in (skill / stage / PROBES).glob("*.jsonl"))


def refuse_repeated(kept: Sequence[str], skill: str) -> None:
    """Refuse two things of one name."""
    if skill in kept:
        raise InvalidValue(f"what is learned and what is kept are both called {skill}; name the skill with --name")
    folded = [name.casefold() for name in kept]  # as some systems take the names of files
    for name in kept:
        if folded.count(name.casefold()) > 1:
            raise InvalidValue(f"two things that are kept are both called {name}; give one of their files another name")


def hold_out(
    name: str, samples: Sequence[Sample], *, unfit: Collection[int] = (), share: int = SHARE
) -> tuple[list[Sample], list[dict[str, Any]]]:
    """Return samples for cores, and rows to measure by: one of `share`, by a hash of its text, with all that go with it."""
    if len(samples) < 2:
        raise InvalidValue(f"{name} has one row; what is kept is made of one part and measured on another: give at least two")
    held = RowHashes(name_of_data(name), samples).held_out(min(MOST_PROBES, max(1, len(samples) // share)), unfit=frozenset(unfit))
    return [s for i, s in enumerate(samples) if i not in held], [row_of(samples[i]) for i in sorted(held)]


def cores_of_layers(part: Kept, adapted: Any) -> dict[str, JoinedCore]:
    """Return an earlier skill's cores, of the layers that are adapted now."""
    assert part.cores is not None
    wanted = list(lora_layers(adapted))
    lost = [layer for layer in wanted if layer not in part.cores]
    if lost:
        raise InvalidValue(f"{part.source} keeps nothing at {lost[0]}; adapt the layers that it adapted, see --targets")
    return {layer: part.cores[layer] for layer in wanted}


def new_cores(name: str, layers: Mapping[str, LayerCore]) -> dict[str, JoinedCore]:
    """Return cores that were just made with the energy of each direction; layers that share a core still do."""
    made = {}
    for part in layers.values():
        shares = part.shares if part.shares is not None else torch.full((part.core.k,), part.retained_energy / part.core.k)
        made[id(part)] = JoinedCore(part.core, {name: shares})
    return {layer: made[id(part)] for layer, part in layers.items()}


def write_joined_cores(folder: Path, cores: Mapping[str, JoinedCore], origin: Mapping[str, Any]) -> None:
    """Write joined cores, and beside them the energy of each thing on their directions."""
    basis = in_float32({layer: joined.core for layer, joined in _one_each(cores).items()})
    write_cores(folder / CORES, {layer: basis[first] for layer, first in first_layers(cores).items()}, origin=origin)
    tensors = {}
    for layer, joined in _one_each(cores).items():
        tensors[f"energy/{layer}"] = torch.stack([e.float() for e in joined.energy.values()])
        tensors[f"whole/{layer}"] = torch.tensor([joined.before_cuts(name) for name in joined.energy])
        if joined.turn is not None:
            tensors[f"turn/{layer}"] = joined.turn.float()
    names = json.dumps(list(next(iter(cores.values())).energy))
    write_tensors(folder / ENERGIES, tensors, metadata={"names": names})


def _one_each(cores: Mapping[str, JoinedCore]) -> dict[str, JoinedCore]:
    return {layer: cores[layer] for layer in dict.fromkeys(first_layers(cores).values())}


def joined_cores_in(stage: Path) -> dict[str, JoinedCore]:
    """Return the joined cores of a stage, which has a seal."""
    cores, tensors = read_cores(stage / CORES), read_tensors(stage / ENERGIES)
    with opened_tensors(stage / ENERGIES) as file:
        names = json.loads(file.metadata()["names"])
    made: dict[int, JoinedCore] = {}
    for layer, core in cores.items():
        if id(core) not in made:
            energy, whole = tensors[f"energy/{layer}"], tensors[f"whole/{layer}"]
            shares = dict(zip(names, energy, strict=True))
            before_cuts = dict(zip(names, whole.tolist(), strict=True))
            made[id(core)] = JoinedCore(core, shares, tensors.get(f"turn/{layer}"), before_cuts)
    return {layer: made[id(core)] for layer, core in cores.items()}


def capacity(cores: Mapping[str, JoinedCore]) -> dict[str, Any]:
    """Return how many directions are protected at the fullest layer input, and for how many more things there is room."""
    layer = max(cores, key=lambda name: cores[name].core.k / cores[name].core.d)
    fullest = cores[layer].core
    room = min(joined.room for joined in cores.values())
    inputs = {name: [joined.core.k, joined.core.d - joined.core.k] for name, joined in _one_each(cores).items()}
    return {"layer": layer, "used": fullest.k, "width": fullest.d, "limit": cores[layer].limit, "skills": room, "inputs": inputs}


def facts_of_joined(part: Kept, cores: Mapping[str, JoinedCore]) -> dict[str, Any]:
    """Return how the cores of something came about, with the energy that the joined cores hold of it."""
    layers = part.facts.get("layers")
    if not layers:
        return part.facts
    cut, kept_layers = 0, {}
    for layer, facts in layers.items():
        joined = cores.get(layer)
        if joined is None or part.name not in joined.energy:
            kept_layers[layer] = facts
            continue
        lost = joined.held(part.name) < joined.before_cuts(part.name) - 1e-5
        cut += lost
        held = joined.held(part.name) if lost or part.cores is not None else facts["retained_energy"]
        kept_layers[layer] = facts | {"retained_energy": held}
    return part.facts | {"layers": kept_layers, "cut": cut}


def rows_of_file(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file that a skill has left."""
    lines = text_of(file).split("\n")
    remedy = "train that skill again, with another --out"
    return [read_json(line, dict[str, Any], where=f"{file}, line {n}", remedy=remedy) for n, line in enumerate(lines, 1) if line]
