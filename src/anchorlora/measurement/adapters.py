"""Audit saved PEFT adapters: no model, no training, files only.

Adapters are paired by name, as PeftModel.save_pretrained writes them: the folder itself is "default", and each subfolder is one
more. A layer's change is that of all adapters together, as when all are active. An adapter that only AFTER has is a new block
that started with B = 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchorlora.adapters import AdaptedLayer, Anchor
from anchorlora.adapters.files import fitted, read_with_whole
from anchorlora.adapters.weights import Weight, WeightLayer
from anchorlora.adapters.whole import NO_WHOLE, WholeWeights, module_of
from anchorlora.devices import type_name
from anchorlora.embedded import folder as embedded
from anchorlora.errors import InvalidValue
from anchorlora.features.files import read_cores
from anchorlora.geometry import Factors, Subspace
from anchorlora.measurement.directions import Protected, WeightDirections, row_space
from anchorlora.measurement.drift import Drift, coarsest, measure
from anchorlora.measurement.layers import Audited, Block, LayerChange, block_layer, weight_layer
from anchorlora.measurement.result import AuditRequest, AuditResult, Find, by_layer
from anchorlora.paths import expanded
from anchorlora.store.adapter_config import read_config, refuse_replicated
from anchorlora.store.artifact import Artifact, artifact_in
from anchorlora.store.run_folder import refuse_altered
from anchorlora.store.tensors import Weights, open_weights
from anchorlora.text import without_secrets

NAMED = 8  # adapters in one note


def audit_adapters(start: Artifact, end: Artifact, ask: AuditRequest) -> AuditResult:
    """Audit two sets of saved adapters."""
    before, after = start.folder, end.folder
    then, now = start.adapters, end.adapters
    if len(then) == len(now) == 1:  # one adapter is one, whatever its name
        now = {next(iter(then)): next(iter(now.values()))}
    if lost := sorted(set(then) - set(now)):
        raise InvalidValue(f"{after} lacks the adapter {lost[0]!r} that {before} has; give two folders of the same adapters")
    notes = _one_base([*then.values(), *now.values()]) + _another_base(ask.model, after, next(iter(now.values())))
    blocks: dict[str, list[Block]] = {}
    earlier: dict[str, list[Factors]] = {}
    cores = None if ask.cores is None else read_cores(ask.cores)
    layers: dict[str, LayerChange] = {}
    whole: list[torch.dtype] = []
    beside: list[str] = []
    for name, folder in now.items():
        old, old_whole = read_with_whole(then[name]) if name in then else (None, NO_WHOLE)
        new, new_whole = read_with_whole(folder)
        for layer, factors in (old or {}).items():
            earlier.setdefault(layer, []).append(factors)
        for layer, block in _blocks(name, old, new, folder, notes).items():
            blocks.setdefault(layer, []).append(block)
        for layer, W0, W in linear_pairs(old_whole, new_whole, cores or ()):
            core = Protected((cores or {}).pop(layer)).fits(layer, d_in=W.shape[1], d_out=W.shape[0])
            layers[layer] = LayerChange() if torch.equal(W0, W) else weight_layer(W0, W, core)
            whole += [W0.dtype, W.dtype]
        if unprotected := other_weights(old_whole, new_whole, layers):
            notes.append(f"whole weights beside the factors differ, and nothing says what they keep: {', '.join(unprotected)}")
            beside += unprotected
    if len(now) > 1:
        more = f", and {len(now) - NAMED} others" if len(now) > NAMED else ""
        notes.append(f"{len(now)} adapters are summed, as when all are active: {', '.join(sorted(now)[:NAMED])}{more}")
    states = [f for layer_blocks in blocks.values() for b in layer_blocks for f in (b.now, b.start) if f is not None]
    stored = coarsest(x.dtype for f in states for x in (f.A, f.B))
    if stored in (torch.bfloat16, torch.float16):
        notes.append(
            f"factors are stored in {type_name(stored)}: rounding alone explains ratios below the numerical tolerance; training "
            "under protection refuses such an adapter (load it with autocast_adapter_dtype=True)"
        )
    changed = {layer for layer, layer_blocks in blocks.items() if any(block.moved for block in layer_blocks)}
    find, protected = _directions(ask, set(blocks), earlier, (start, end), cores, changed=changed)
    known = end.cores_before
    if known is not None and ask == AuditRequest(model=ask.model):
        notes.append(f"{after} has cores of what came before: --cores {known} measures on these")
    layers = {layer: _block_layer(layer, layer_blocks, find) for layer, layer_blocks in blocks.items()} | layers
    unique = tuple(dict.fromkeys(notes))
    storage, audited = type_name(coarsest((stored, *whole))), Audited.of(layers)
    return AuditResult(str(before), str(after), "adapters", protected, storage, audited, unique, tuple(beside))


def _blocks(
    name: str, old: Mapping[str, Factors] | None, new: Mapping[str, Factors], folder: Path, notes: list[str]
) -> dict[str, Block]:
    """One adapter's blocks by layer."""
    if old is None:
        start = read_config(folder).get("init_lora_weights", True)
        if start not in (True, None, "gaussian", "eva"):
            raise InvalidValue(
                f"{folder} has no earlier state, and init_lora_weights {start!r} does not start with B = 0; "
                "give the adapter as it was before"
            )
        notes.append(f"the adapter {name!r} is new: a block that started with B = 0; where its A started was not saved")
        return {layer: Block(factors, None) for layer, factors in new.items()}
    if set(old) != set(new):
        odd = sorted(set(old) ^ set(new))
        raise InvalidValue(
            f"{folder} has other targets than before: {odd[0]} and {len(odd) - 1} others are in one of them only; to audit all of "
            "it, merge both into their base with PEFT (merge_and_unload, then save_pretrained), and give these models"
        )
    out = {}
    for layer, factors in new.items():
        start = old[layer]
        if (factors.A.shape[1], factors.B.shape[0]) != (start.A.shape[1], start.B.shape[0]):
            raise InvalidValue(f"{layer} has another width than before in {folder}; the adapters belong to different models")
        if newer := factors.grown_from(start):
            notes.append("new rows are stacked behind the unchanged earlier ones: the new rows are a block that started with B = 0")
        elif factors.rank != start.rank or factors.scale != start.scale:
            notes.append("rank or scale changed, so the products are compared: the factors have no common anchor")
        out[layer] = Block(newer, None) if newer else Block(factors, start)
    return out


def _one_base(folders: list[Path]) -> list[str]:
    """Refuse adapters of different base models, equal by the last part of their name; return notes on different revisions."""
    bases = {folder: without_secrets(str(read_config(folder).get("base_model_name_or_path") or "")) for folder in folders}
    names = {Path(base).name: folder for folder, base in bases.items() if base}
    if len(names) > 1:
        (_, one), (_, other) = list(names.items())[:2]
        raise InvalidValue(
            f"{one} was trained on {bases[one]} and {other} on {bases[other]}: a difference between adapters of different bases "
            "says nothing about either"
        )
    revisions = {str(read_config(folder).get("revision") or "main"): folder for folder in folders}
    if len(revisions) == 1:
        return []
    named = ", ".join(f"{revision} ({folder})" for revision, folder in revisions.items())
    return [f"the adapters name different revisions of their base ({named}); if its weights differ, the numbers say nothing"]


def _another_base(model: str | None, after: Path, adapter: Path) -> list[str]:
    """A note on a model that is given and whose path has not the last part of the name of the adapter's base in it."""
    base = without_secrets(str(read_config(adapter).get("base_model_name_or_path") or "")).rstrip("/")
    path, name = (text.replace(":", "/").lower() for text in (expanded(model or "").resolve().as_posix(), Path(base).name))
    if model is None or name in path:
        return []
    return [f"{after} names {base} as its base model, and {model} was given; if their weights differ, the numbers say nothing"]


def _block_layer(layer: str, blocks: list[Block], find: Find) -> LayerChange:
    if not any(block.moved for block in blocks):
        return LayerChange()
    first = blocks[0].now
    return block_layer(blocks, find(layer).fits(layer, d_in=first.A.shape[1], d_out=first.B.shape[0]))


def _directions(
    ask: AuditRequest,
    layers: set[str],
    earlier: Mapping[str, list[Factors]],
    checkpoints: tuple[Artifact, Artifact],
    cores: Mapping[str, Subspace] | None,
    *,
    changed: set[str],
) -> tuple[Find, str]:
    start, end = checkpoints
    bare = not start.adapters  # the base model, which had no adapter yet
    folder = next(iter((end if bare else start).adapters.values()))
    if ask.data is not None:
        from anchorlora.models.cores_from_text import cores_from_data  # models and tokenizers, which no other audit needs

        name = ask.model or read_config(folder).get("base_model_name_or_path")
        if not name:
            raise InvalidValue(f"--data needs the base model, and {folder} names none; give it with --model")
        before = {"targets": tuple(sorted(changed or layers))} if bare else {"adapter": start.adapter}
        made = cores_from_data(str(name), data=ask.data, **before).cores
        return by_layer(made, changed | layers & set(made), str(ask.data)), f"cores made of {ask.data}"
    if cores is not None:
        return by_layer(cores, changed | layers & set(cores), str(ask.cores)), f"the cores of {ask.cores}"
    if ask.weights is not None:
        refuse_replicated(folder)
        base = _base_weights(ask.model or read_config(folder).get("base_model_name_or_path"))
        wanted, names = WeightDirections(ask.weights), _names_in(base, layers)

        def singular(layer: str) -> Protected:
            return wanted.of(layer, base.weight_of(names[layer]))

        return singular, f"the {ask.weights} leading singular directions of each weight in {base.place}"
    rows = {layer: [f.A for f in layer_factors if bool(f.B.any())] for layer, layer_factors in earlier.items()}

    def learned(layer: str) -> Protected:
        if not rows.get(layer):
            raise InvalidValue(f"BEFORE has no trained rows at {layer} to protect; give --cores FILE or --weights K")
        return Protected(row_space(rows[layer]))

    return learned, "the rows of A in BEFORE, as in O-LoRA"


def _base_weights(name: Any) -> Weights:
    folder = embedded(str(name), "base_model") or expanded(str(name or ""))
    if not name or not folder.exists():
        raise InvalidValue(
            f"--weights needs the base model's folder, and {without_secrets(str(name))!r} is not here; give it with --model"
        )
    return open_weights(folder)


def _names_in(base: Weights, layers: Collection[str]) -> dict[str, str]:
    """Layers of an adapter with their names in a model's files, whose prefix may be another; their own where none fits."""
    modules = [name.removesuffix(".weight") for name in base.files]
    try:
        return {layer: name for name, layer in fitted({layer: layer for layer in layers}, modules, where=str(base.place)).items()}
    except InvalidValue:  # the weights say what they lack
        return {layer: layer for layer in layers}


def compare(before: Path, after: Path, *, cores: Path) -> Drift:
    """Measure the drift from one saved PEFT adapter to another of the same base, on the cores of a file. Blocks stacked behind the
    earlier adapter are measured alone, exact to the last digit.
    """
    then, now = artifact_in(embedded(str(before), "base_model") or before), artifact_in(after)
    refuse_altered(cores)
    later, new = read_with_whole(now.adapter)
    earlier, old = {layer: f.unborn() for layer, f in later.items()}, NO_WHOLE
    if then.kind != "model":
        earlier, old = read_with_whole(then.adapter)
        try:
            notes = _one_base([then.adapter, now.adapter])
        except InvalidValue as error:  # by their names; a copy in a folder of another name is the same base
            notes = [str(error)]
        for note in notes:
            warnings.warn(note, stacklevel=2)
    known = read_cores(cores)
    beside = [WeightLayer(name, Weight(W), Weight(W0), core=known.pop(name)) for name, W0, W in linear_pairs(old, new, known)]
    drift = measure(Anchor((*layers(earlier, later, known), *beside)))
    return replace(drift, unprotected=other_weights(old, new, {layer.name for layer in beside}))


def linear_pairs(old: WholeWeights, new: WholeWeights, cores: Collection[str]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the modules with a core whose whole weight both adapters hold, with that weight before and after."""
    names = [f"{module}.weight" for module in sorted(cores)]
    both = old.tensors.keys() & new.tensors.keys()
    pairs = [(module_of(name), old.tensors[name], new.tensors[name]) for name in names if name in both]
    for module, W0, W in pairs:
        if W0.shape != W.shape:
            sizes = f"was {[*W0.shape]} and is {[*W.shape]}"
            raise InvalidValue(f"{module} {sizes}, so no core measures its change; leave it out of the cores")
    return pairs


def other_weights(old: WholeWeights, new: WholeWeights, known: Collection[str]) -> tuple[str, ...]:
    """Return the modules whose whole weights one adapter holds alone, or both and not alike, but for those that are known."""
    pairs = {name: (old.tensors.get(name), new.tensors.get(name)) for name in old.tensors.keys() | new.tensors.keys()}
    moved = {module_of(name) for name, (W0, W) in pairs.items() if W0 is None or W is None or not torch.equal(W0, W)}
    return tuple(sorted(moved - set(known)))


def layers(before: Mapping[str, Factors], after: Mapping[str, Factors], cores: Mapping[str, Subspace]) -> tuple[AdaptedLayer, ...]:
    """Return one adapted layer for each layer of two adapters, with the earlier factors as its start; those without a core that are
    the same in both, as of a vision tower, are left out.
    """
    after = {layer: f for layer, f in after.items() if layer in cores or not _is_same(f, before.get(layer))}
    before = {layer: f for layer, f in before.items() if layer in cores or layer in after}
    for what, other in (("the two adapters", set(before)), ("adapter and cores", set(cores))):
        if other != set(after):
            odd = sorted(other ^ set(after))
            raise InvalidValue(f"{what} do not fit: {odd[0]} and {len(odd) - 1} others are in one of them only")
    out = []
    for layer, now in after.items():
        if cores[layer].d != now.A.shape[1]:
            raise InvalidValue(f"the core of {layer} has width {cores[layer].d}, but its A reads {now.A.shape[1]} inputs")
        newer = now.grown_from(before[layer])
        current, anchor = (newer, newer.unborn()) if newer else (now, before[layer])
        out.append(AdaptedLayer(layer, current, anchor, core=cores[layer]))
    return tuple(out)


def _is_same(one: Factors, other: Factors | None) -> bool:
    return other is not None and one.scale == other.scale and torch.equal(one.A, other.A) and torch.equal(one.B, other.B)
