"""What surrounds the training of a skill: the text and the cores of what is kept, and scores of everything before and after.

    skill/before/  cores.safetensors  what the skill must keep          probes/<name>.jsonl  held-out text of what is kept
                   scores.json        of the skill's test and of all probes, with the model as it was
                   facts.json         how the cores came about
                   memory.safetensors what a method that remembers what answers depend on knows of everything that is kept
    skill/after/   cores.safetensors  the same and the new skill's own  probes/<skill>.jsonl held-out examples of the skill
                   scores.json        of all probes, with the new adapter
                   memory.safetensors what such a method remembers now

A later skill goes on from these folders alone; it never asks for the data again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor

from anchorlora import embedded
from anchorlora.adapters import AdapterStack, attach, read_adapter, usual_targets
from anchorlora.audits.cores_from_text import MadeCores, cores_of_samples
from anchorlora.config import Recipe
from anchorlora.continual.evaluate import predict
from anchorlora.continual.memory import memory_of_text
from anchorlora.continual.seeds import number
from anchorlora.errors import InvalidValue
from anchorlora.features import read_cores, write_cores
from anchorlora.features.files import read_origin, read_tensors
from anchorlora.geometry import Subspace, in_float32, joined_by_layer
from anchorlora.methods import Method
from anchorlora.models.load import LoadedModel, load_base_model
from anchorlora.models.own_text import own_text
from anchorlora.models.packing import unpackable
from anchorlora.runs.directory import SKILL, RunDirectory
from anchorlora.schemas.json import loads
from anchorlora.skills.request import CORES, MEMORY, SELF, SkillRequest, default_recipe
from anchorlora.storage.files import new_folder, write_lines, write_text
from anchorlora.storage.tensors import write_tensors
from anchorlora.tasks import Encoder, Sample, TextFiles, TextSource, read_samples
from anchorlora.tasks.text import text_hash

SCORES, FACTS, PROBES = "scores.json", "facts.json", "probes"
MOST_ROWS = 10_000  # of a kept file, which cores are made from
MOST_PROBES = 200  # held-out rows of one kept source
SHARE = 5  # every fifth row of what is kept is held out to measure
OWN_TOKENS = 256  # of a text that the model writes itself
Say = Callable[[str], None]


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


def before(request: SkillRequest, folder: Path, say: Say, method: Method) -> None:
    """Write `before/`: the cores of what is kept, what the method remembers of it, and scores of the model as it was.

    Args:
        request: What was asked for.
        folder: The folder `skill` of the run directory, with tasks.yaml.
        say: Is told what is being done.
        method: The method that the skill is trained with.

    Raises:
        InvalidValue: A file cannot be read, or its text makes no core.
    """
    recipe = default_recipe().changed(request.settings)
    kept = [part for place in earlier_places(request) for part in _read(place, request.keep_columns)]
    say(f"loading {request.base_model.model}")
    loaded, adapted, tokenizer = opened(request, request.adapter)
    room = min(recipe.training.max_tokens, getattr(loaded.model.config, "max_position_embeddings", recipe.training.max_tokens))
    for part in kept:
        if part.source == SELF:
            say(f"writing {request.own} texts of its own")
            rows = own_text(
                adapted,
                tokenizer,
                count=request.own,
                seed=number(request.seed, "own text"),
                max_tokens=min(room, OWN_TOKENS),
                chat=bool(tokenizer.chat_template) and request.base_model.chat_template is None,
            )
            part.samples, part.probes = _held_out(part.name, read_samples(rows))
    _refuse_repeated([part.name for part in kept] + [request.name])
    union: dict[str, Subspace] = {}
    memory: Mapping[str, Tensor] = next((part.memory for part in kept if part.memory is not None), {})
    for part in kept:
        if method.reads_past and part.cores is None:
            say(f"reading what answers depend on in {part.name}")
            memory = memory_of_text(
                method,
                adapted,
                tokenizer,
                part.samples,
                name=part.name,
                device=loaded.device,
                max_tokens=room,
                past=memory,
            )
        if part.cores is None:
            say(f"making the cores of {part.name}")
            made = _cores(loaded, adapted, tokenizer, part.samples, recipe, room)
            part.facts, found = dict(made.origin), made.cores
        else:
            found = _of_layers(part, adapted)
        union = joined_by_layer(union, found)
    with new_folder(folder / "before") as temporary:
        (temporary / PROBES).mkdir()
        for part in kept:
            if part.probes:
                write_lines(temporary / PROBES / f"{part.name}.jsonl", part.probes)
        if union:
            write_cores(temporary / CORES, in_float32(union), origin={"kept": [part.name for part in kept]})
        facts: dict[str, Any] = {
            "kept": [{"name": p.name, "source": p.source, "probes": len(p.probes), **p.facts} for p in kept],
            "targets": _targets(request, loaded),
            "gpu": loaded.device.type != "cpu",
        }
        if method.reads_past:
            write_tensors(temporary / MEMORY, memory)
            for each in facts["kept"]:
                each.pop("layers", None)  # of cores that only a later skill may protect
        if method.provided_cores is not None:
            protected = method.provided_cores(memory).values()
            facts["memory"] = {
                "directions": mean(each.core.k for each in protected),
                "energy": mean(each.retained_energy for each in protected),
            }
        write_text(temporary / FACTS, json.dumps(facts, indent=1))
        tasks = {request.name: skill_files(folder), **{p.name: probes_in(temporary, p.name) for p in kept if p.probes}}
        scores = scored(loaded, adapted, tokenizer, tasks, recipe, say)
        write_text(temporary / SCORES, json.dumps(scores))


def after(request: SkillRequest, folder: Path, adapter: Path, recipe: Recipe, say: Say, method: Method) -> None:
    """Write `after/`: scores of what was kept with the new adapter, and the cores and the memory that a later skill goes on from.

    Args:
        request: What was asked for.
        folder: The folder `skill` of the run directory, with `before/`.
        adapter: Folder of the new adapter.
        recipe: The recipe of the run.
        say: Is told what is being done.
        method: The method that the skill was trained with.
    """
    loaded, adapted, tokenizer = opened(request, adapter)
    room = min(recipe.training.max_tokens, getattr(loaded.model.config, "max_position_embeddings", recipe.training.max_tokens))
    names = [each["name"] for each in facts_in(folder)["kept"] if each["probes"]]
    tasks = {name: probes_in(folder / "before", name) for name in names}
    with new_folder(folder / "after") as temporary:
        scores = scored(loaded, adapted, tokenizer, tasks, recipe, say)
        write_text(temporary / SCORES, json.dumps(scores))
        say(f"making the cores of {request.name}")
        source = skill_files(folder)
        samples = read_samples(source.sources[request.name].train, column=request.columns, limit=MOST_ROWS)
        made = _cores(loaded, adapted, tokenizer, samples, recipe, room)
        earlier = folder / "before" / CORES
        union = joined_by_layer(read_cores(earlier) if earlier.exists() else {}, made.cores)
        write_cores(temporary / CORES, in_float32(union), origin=dict(made.origin))
        if method.reads_past:
            write_tensors(temporary / MEMORY, RunDirectory(folder.parent).remembered(1))
        (temporary / PROBES).mkdir()
        tests = list(source.rows_of(request.name, "test"))[:MOST_PROBES]
        write_lines(temporary / PROBES / f"{request.name}.jsonl", [_row(sample) for sample in tests])


def opened(request: SkillRequest, adapter: Path | None) -> tuple[LoadedModel, Any, Any]:
    """Return the base model, the same with an adapter or with empty ones, and its tokenizer.

    Args:
        request: What was asked for.
        adapter: Folder of an adapter; None for empty ones.
    """
    name = request.base_model.model or ""
    loaded = load_base_model(request.base_model, folder=embedded.folder(name, "base_model"))
    if adapter is not None:
        return loaded, attach(loaded.model, adapter), loaded.tokenizer
    stack = AdapterStack(loaded.model, request.targets or usual_targets(loaded.model), rank=1, alpha=1)
    return loaded, stack.model.eval(), loaded.tokenizer


def scored(
    loaded: LoadedModel, adapted: Any, tokenizer: Any, tasks: Mapping[str, TextFiles], recipe: Recipe, say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Return the scores of every test example of some tasks.

    Args:
        loaded: The base model.
        adapted: The same with adapters.
        tokenizer: Its tokenizer.
        tasks: Name of a task -> its files.
        recipe: How answers are generated.
        say: Is told what is being done.

    Returns:
        Name of a task -> for each test example, text, gold and metrics, the primary one first.
    """
    encoder, evaluation, found = Encoder(tokenizer, max_tokens=recipe.training.max_tokens), recipe.evaluation, {}
    for name, files in tasks.items():
        say(f"testing {name}")
        task = files.task(name)
        examples = encoder.encode(task, files.examples(name, "test", limit=recipe.tasks.test_limit))
        packed = unpackable(adapted, [e.prompt + e.answer for e in examples[:3]]) is None
        answers = predict(
            adapted,
            tokenizer,
            task,
            examples,
            max_new_tokens=evaluation.max_new_tokens,
            batch=evaluation.eval_batch,
            device=loaded.device,
            packed=packed,
        )
        found[name] = [{"text": a.text, "gold": a.gold, "metrics": dict(a.scores)} for a in answers]
    return found


def skill_files(folder: Path) -> TextFiles:
    """Return the files of the new skill.

    Args:
        folder: The folder `skill` of the run directory, with tasks.yaml.
    """
    from anchorlora.config import TaskSettings
    from anchorlora.runs.sources import source_of

    found = source_of(TaskSettings(data=str(folder / "tasks.yaml")))
    assert isinstance(found, TextFiles)
    return found


def probes_in(folder: Path, name: str) -> TextFiles:
    """Return the probes of something that is kept, as a task that is only tested.

    Args:
        folder: `before` or `after`.
        name: Name of what is kept.
    """
    place = str(folder / PROBES / f"{name}.jsonl")
    return TextFiles({name: TextSource(place, test=place)})


def facts_in(folder: Path) -> dict[str, Any]:
    """Return the facts of `before/`.

    Args:
        folder: The folder `skill` of the run directory.
    """
    return dict(loads((folder / "before" / FACTS).read_text()))


def scores_in(folder: Path, stage: str) -> dict[str, list[dict[str, Any]]]:
    """Return the scores of a stage.

    Args:
        folder: The folder `skill` of the run directory.
        stage: "before" or "after".
    """
    return dict(loads((folder / stage / SCORES).read_text()))


def earlier_places(request: SkillRequest) -> list[str]:
    """Return everything that is kept: files, "self", and directories of earlier skills.

    Args:
        request: What was asked for.
    """
    return [*([request.after] if request.after is not None else []), *request.keep]


def _read(place: str, columns: str | None) -> list[Kept]:
    """What a place of `--keep` or `--after` stands for."""
    if place == SELF:
        return [Kept(SELF, SELF)]
    skill = Path(place) / SKILL
    if not skill.is_dir():
        samples, probes = _held_out(place, read_samples(place, column=columns, limit=MOST_ROWS))
        return [Kept(_stem(place), place, samples, probes)]
    if not (skill / "after").is_dir():
        raise InvalidValue(f"{place} has not been trained to its end; run its command again, then continue from it")
    cores, origin = read_cores(skill / "after" / CORES), read_origin(skill / "after" / CORES)
    files = sorted(file for stage in ("before", "after") for file in (skill / stage / PROBES).glob("*.jsonl"))
    left = skill / "after" / MEMORY
    memory = read_tensors(left) if left.is_file() else None
    return [Kept(file.stem, place, probes=_rows(file), cores=cores, memory=memory, facts=origin) for file in files]


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def _stem(place: str) -> str:
    from anchorlora.skills.request import _name

    return _name(place)


def _refuse_repeated(names: Sequence[str]) -> None:
    for name in names:
        if list(names).count(name) > 1:
            raise InvalidValue(f"{name} stands for two things: what is kept and what is learned have different names; see --name")


def _held_out(name: str, samples: Sequence[Sample]) -> tuple[list[Sample], list[dict[str, Any]]]:
    """Samples for cores, and rows to measure by: every fifth, by a hash of its text."""
    if len(samples) < 2:
        raise InvalidValue(f"{name} has one row; what is kept is made of one part and measured on another: give at least two")
    order = sorted(range(len(samples)), key=lambda i: text_hash(name, samples[i]))
    held = set(order[: min(MOST_PROBES, max(1, len(samples) // SHARE))])
    return [s for i, s in enumerate(samples) if i not in held], [_row(samples[i]) for i in sorted(held)]


def _row(sample: Sample) -> dict[str, Any]:
    """A sample as a row of a JSONL file."""
    content = sample.content
    if sample.plain is not None and not isinstance(content, str):
        return {"instruction": content[0]["content"], "output": content[1]["content"]}
    if isinstance(content, str):
        return {"prompt": content[: sample.given], "completion": content[sample.given :]} if sample.given else {"text": content}
    messages = [dict(message) for message in content]
    return {"prompt": messages[: sample.given], "completion": messages[sample.given :]} if sample.given else {"messages": messages}


def _cores(loaded: LoadedModel, adapted: Any, tokenizer: Any, samples: Iterable[Sample], recipe: Recipe, room: int) -> MadeCores:
    f = recipe.features
    return cores_of_samples(
        adapted,
        tokenizer,
        list(samples),
        device=loaded.device,
        rows=f.rows,
        energy=f.energy,
        at_least=f.at_least,
        at_most=f.at_most,
        max_tokens=room,
        spread=True,
    )


def _of_layers(part: Kept, adapted: Any) -> dict[str, Subspace]:
    """An earlier skill's cores, of the layers that are adapted now."""
    from anchorlora.adapters import lora_layers

    assert part.cores is not None
    wanted = list(lora_layers(adapted))
    lost = [layer for layer in wanted if layer not in part.cores]
    if lost:
        raise InvalidValue(f"{part.source} keeps nothing at {lost[0]}; adapt the layers that it adapted, see --targets")
    return {layer: part.cores[layer] for layer in wanted}


def _targets(request: SkillRequest, loaded: LoadedModel) -> Any:
    """Modules to adapt: those of the old adapter, those that were asked for, or the usual ones."""
    if request.adapter is not None:
        return sorted({layer.rsplit(".", 1)[-1] for layer in read_adapter(request.adapter)})
    return request.targets or usual_targets(loaded.model)


def change_on(
    data: str | Path, before: Path, after: Path, *, model: str | None = None, columns: str | None = None
) -> dict[str, Any]:
    """Return loss and primary metric on data, with one adapter and with another of the same base model.

    Args:
        data: A file, a folder written by `datasets`, or ORG/NAME:SPLIT of the hub.
        before: A run, a task of one, a saved adapter, or the base model's folder.
        after: The same, later; it has an adapter.
        model: The base model, if another than `after` names.
        columns: Which columns to read.

    Returns:
        What `anchorlora.skills.verdict.compared` makes of both.

    Raises:
        InvalidValue: The data or a folder cannot be read, or no base model is named.
    """
    from anchorlora.models.artifact import artifact_in
    from anchorlora.skills.verdict import compared

    then, now = artifact_in(before), artifact_in(after)
    settings = now.base_model(model)
    if settings.model is None:
        raise InvalidValue(f"{after} names no base model; give it with --model")
    place = str(data)
    files = TextFiles({"data": TextSource(place, test=place, columns=columns)})
    files.task("data")  # what cannot be read is refused before the model is loaded
    found = []
    for adapter in (None if then.kind == "model" else then.adapter, now.adapter):
        loaded = load_base_model(settings, folder=embedded.folder(settings.model, "base_model"))
        adapted = (
            attach(loaded.model, adapter)
            if adapter is not None
            else AdapterStack(loaded.model, usual_targets(loaded.model), rank=1, alpha=1).model
        )
        found.append(scored(loaded, adapted.eval(), loaded.tokenizer, {"data": files}, default_recipe(), lambda said: None)["data"])
    return compared(*found)
