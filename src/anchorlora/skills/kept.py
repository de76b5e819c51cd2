"""What a skill must keep: where its text comes from, what is held out to measure it, and the cores of earlier skills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from anchorlora.adapters import lora_layers
from anchorlora.errors import InvalidValue
from anchorlora.features import read_cores
from anchorlora.features.files import read_origin, read_tensors
from anchorlora.geometry import Subspace
from anchorlora.runs.directory import SKILL
from anchorlora.schemas.json import read_json, text_of
from anchorlora.skills.request import CORES, MEMORY, SELF, SkillRequest, name_of_data
from anchorlora.skills.sealed import refuse_damaged
from anchorlora.tasks import Sample, read_samples
from anchorlora.tasks.text import text_hash

PROBES = "probes"
MOST_ROWS = 10_000  # of a kept file, which cores are made from
MOST_PROBES = 200  # held-out rows of one kept source
SHARE = 5  # every fifth row of what is kept is held out to measure


@dataclass(eq=False)
class Kept:
    """Something that is kept.

    Args:
        name: Its name.
        source: Where it comes from, in words.
        samples: Text that cores are made from; none for an earlier skill, whose cores are there.
        probes: Rows to measure by.
        cores: The cores of an earlier skill and of all that it kept.
        memory: What it remembers of what its answers depend on, and those of all that it kept; None where it does not.
        facts: How the cores came about: energy asked for, and each layer's k, k_star, retained energy and rows.
    """

    name: str
    source: str
    samples: list[Sample] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    cores: Mapping[str, Subspace] | None = None
    memory: Mapping[str, Tensor] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def earlier_places(request: SkillRequest) -> list[str]:
    """Return everything that is kept: files, "self", and directories of earlier skills.

    Args:
        request: What was asked for.
    """
    return [*([request.after] if request.after is not None else []), *request.keep]


def kept_at(place: str, columns: str | None) -> list[Kept]:
    """Return what a place of `--keep` or `--after` stands for: one thing, or an earlier skill and all that it kept.

    Args:
        place: A file, a dataset, "self", or the directory of an earlier skill.
        columns: Which columns of a file to read.

    Raises:
        InvalidValue: A file cannot be read, or the skill has not been trained to its end.
    """
    if place == SELF:
        return [Kept(SELF, SELF)]
    skill = Path(place) / SKILL
    if not skill.is_dir():
        samples, probes = held_out(place, read_samples(place, column=columns, limit=MOST_ROWS))
        return [Kept(name_of_data(place), place, samples, probes)]
    refuse_damaged(Path(place))
    cores, origin = read_cores(skill / "after" / CORES), read_origin(skill / "after" / CORES)
    files = sorted(file for stage in ("before", "after") for file in (skill / stage / PROBES).glob("*.jsonl"))
    left = skill / "after" / MEMORY
    memory = read_tensors(left) if left.is_file() else None
    return [Kept(file.stem, place, probes=_rows(file), cores=cores, memory=memory, facts=origin) for file in files]


def refuse_repeated(names: Sequence[str]) -> None:
    """Refuse two things of one name.

    Args:
        names: Names of what is kept and of what is learned.

    Raises:
        InvalidValue: A name occurs twice.
    """
    for name in names:
        if list(names).count(name) > 1:
            raise InvalidValue(f"{name} stands for two things: what is kept and what is learned have different names; see --name")


def held_out(name: str, samples: Sequence[Sample]) -> tuple[list[Sample], list[dict[str, Any]]]:
    """Return samples for cores, and rows to measure by: every fifth, by a hash of its text.

    Args:
        name: Name of what is kept.
        samples: All its samples.

    Raises:
        InvalidValue: There is one sample alone.
    """
    if len(samples) < 2:
        raise InvalidValue(f"{name} has one row; what is kept is made of one part and measured on another: give at least two")
    order = sorted(range(len(samples)), key=lambda i: text_hash(name, samples[i]))
    held = set(order[: min(MOST_PROBES, max(1, len(samples) // SHARE))])
    return [s for i, s in enumerate(samples) if i not in held], [row_of(samples[i]) for i in sorted(held)]


def row_of(sample: Sample) -> dict[str, Any]:
    """Return a sample as a row of a JSONL file.

    Args:
        sample: A text, or a conversation.
    """
    content = sample.content
    if sample.plain is not None and not isinstance(content, str):
        return {"instruction": content[0]["content"], "output": content[1]["content"]}
    if isinstance(content, str):
        return {"prompt": content[: sample.given], "completion": content[sample.given :]} if sample.given else {"text": content}
    messages = [dict(message) for message in content]
    return {"prompt": messages[: sample.given], "completion": messages[sample.given :]} if sample.given else {"messages": messages}


def cores_of_layers(part: Kept, adapted: Any) -> dict[str, Subspace]:
    """Return an earlier skill's cores, of the layers that are adapted now.

    Args:
        part: The earlier skill.
        adapted: The model with adapters.

    Raises:
        InvalidValue: The skill has no core of an adapted layer.
    """
    assert part.cores is not None
    wanted = list(lora_layers(adapted))
    lost = [layer for layer in wanted if layer not in part.cores]
    if lost:
        raise InvalidValue(f"{part.source} keeps nothing at {lost[0]}; adapt the layers that it adapted, see --targets")
    return {layer: part.cores[layer] for layer in wanted}


def _rows(file: Path) -> list[dict[str, Any]]:
    lines = text_of(file).split("\n")
    remedy = "train that skill again, with another --out"
    return [read_json(line, dict[str, Any], where=f"{file}, line {n}", remedy=remedy) for n, line in enumerate(lines, 1) if line]
