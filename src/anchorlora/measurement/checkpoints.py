"""Audit two checkpoints on disk, adapters or full weights.

Full weights of one shape are paired by tensor name and read one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from anchorlora.devices import type_name
from anchorlora.embedded import folder as embedded
from anchorlora.errors import InvalidValue
from anchorlora.features.files import read_cores
from anchorlora.measurement.adapters import audit_adapters
from anchorlora.measurement.directions import WeightDirections
from anchorlora.measurement.drift import coarsest
from anchorlora.measurement.layers import Audited, LayerChange, weight_layer
from anchorlora.measurement.result import AuditRequest, AuditResult, by_layer, not_audited
from anchorlora.store.artifact import Artifact, artifact_in
from anchorlora.store.run_folder import refuse_altered
from anchorlora.store.tensors import Weights, is_lookup, open_weights


def audit_weights(before: Path, after: Path, ask: AuditRequest) -> AuditResult:
    """Audit two sets of full weights of one shape."""
    then, now = open_weights(before), open_weights(after)
    then, now = _with_head(then, now), _with_head(now, then)
    resized = _resized_tables(then, now)
    _same_tensors(then, now, but_for=resized)
    if ask.data is not None:
        raise InvalidValue("--data makes cores for an adapter; for full weights give --cores FILE or --weights K")
    layers = [name.removesuffix(".weight") for name in now.files if now.is_linear(name) and name not in resized]
    if ask.cores is not None:
        cores = read_cores(ask.cores)
        find, protected = by_layer(cores, set(cores) & set(layers), str(ask.cores)), f"the cores of {ask.cores}"
        layers = [layer for layer in layers if layer in cores]
    else:
        count = "leading half of the" if ask.weights is None else f"{ask.weights} leading"
        find, protected = None, f"the {count} singular directions of each weight in BEFORE, as in OSF"
    changes: dict[str, LayerChange] = {}
    stored, others, turned = torch.float64, [], now.by_inputs
    for name in (other for other in now.files if other not in resized):
        W0, W, layer = then.read(name), now.read(name), name.removesuffix(".weight")
        _check(name, W0, W, now)
        W0, W = (W0.T, W.T) if name in turned else (W0, W)
        same = W0.dtype == W.dtype and torch.equal(W0, W)
        if name.endswith(".weight") and layer in layers:
            stored = coarsest((stored, W0.dtype, W.dtype))
            changes[layer] = LayerChange()
            if not same:
                directions = find(layer) if find else WeightDirections(ask.weights).of(layer, W0)
                changes[layer] = weight_layer(W0, W, directions.fits(layer, d_in=W.shape[1], d_out=W.shape[0]))
        elif not same and not _same_values(W0, W):
            others.append(name)
    inputs_first = f", and {len(turned)} as (d_in, d_out), as GPT-2 stores them: the lengths of biases tell" if turned else ""
    notes = [f"weights are read as (d_out, d_in), as torch.nn.Linear stores them{inputs_first}"]
    if others:
        notes.append(not_audited(others))
    if resized:
        rows, more = then.shape(resized[0])[0], now.shape(resized[0])[0]
        notes.append(f"the vocabulary had {rows} rows and has {more}, so these were not audited: {', '.join(resized)}")
    beside = (*others, *resized)
    return AuditResult(str(before), str(after), "weights", protected, type_name(stored), Audited.of(changes), tuple(notes), beside)


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if tensors are equal but for the types that they are stored in, as of a model that was merged in another one."""
    if one.dtype == other.dtype or not all(w.is_floating_point() and w.dtype.itemsize > 1 for w in (one, other)):
        return False
    kind = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(kind), other.to(kind))


def _check(name: str, W0: torch.Tensor, W: torch.Tensor, now: Weights) -> None:
    if W.ndim == 2 and not all(w.is_floating_point() and w.dtype.itemsize > 1 for w in (W0, W)):
        raise InvalidValue(f"{name} in {now.place} is stored in {type_name(W.dtype)}; quantized weights are not audited")
    if not all(bool(torch.isfinite(w).all()) for w in (W0, W) if w.is_floating_point() and w.dtype.itemsize > 1):
        raise InvalidValue(f"{name} holds NaN or infinite values in one of the checkpoints, the later one being {now.place}")
    if any(w.dtype == torch.float64 and bool((w.abs() > torch.finfo(torch.float32).max).any()) for w in (W0, W)):
        raise InvalidValue(f"{name} holds values beyond float32 in one of the checkpoints, the later one being {now.place}")


def _with_head(weights: Weights, other: Weights) -> Weights:
    """Return weights with the head that only the other checkpoint stores: here it is tied to the table of embeddings."""
    heads = sorted(set(other.files) - set(weights.files))
    shared = [name for name in weights.files if is_lookup(name) and name in other.files and heads]
    tables = [name for name in shared if other.shape(name) == other.shape(heads[0])]  # here it may have other rows than there
    if len(heads) != 1 or len(tables) != 1 or not other.is_linear(heads[0]):
        return weights
    return replace(weights, files={**weights.files, heads[0]: weights.files[tables[0]]}, tied={heads[0]: tables[0]})


def _resized_tables(then: Weights, now: Weights) -> list[str]:
    """Return the tables of embeddings with another number of rows, and what has as many rows, such as the head."""
    shapes = {name: (then.shape(name), now.shape(name)) for name in now.files if name in then.files}
    other = {name: (a[0], b[0]) for name, (a, b) in shapes.items() if a and b and a[0] != b[0] and a[1:] == b[1:]}
    tables = {rows for name, rows in other.items() if is_lookup(name)}
    return [name for name, rows in other.items() if rows in tables]


def _same_tensors(then: Weights, now: Weights, *, but_for: Collection[str]) -> None:
    if odd := sorted(set(then.files) ^ set(now.files)):
        raise InvalidValue(
            f"{then.place} and {now.place} are different models: {odd[0]} and {len(odd) - 1} others are in one only; if "
            "two programs saved one model, load both with transformers and save them again (from_pretrained, save_pretrained)"
        )
    for name in now.files:
        if then.shape(name) != now.shape(name) and name not in but_for:
            raise InvalidValue(f"{name} is {then.shape(name)} in {then.place} and {now.shape(name)} in {now.place}")


def audit(
    before: str | Path,
    after: str | Path,
    *,
    cores: str | Path | None = None,
    data: str | Path | None = None,
    weights: int | None = None,
    model: str | None = None,
) -> AuditResult:
    """Audit two checkpoints: measure how much of the change between them lies on protected directions.

        rho = |dW V| / |dW|      dW  change of a layer      V  (d_in, k)  its protected directions

    Each is a run (its last task), a task of a run, a folder of PEFT LoRA adapters (several in one folder are summed), or full
    weights in safetensors. `before` may also be the base model of an adapter; then all of `after` is new. Nothing is run; files
    are read as data.

    Args:
        before: Earlier checkpoint.
        after: Later checkpoint.
        cores: File of protected subspaces, as `anchorlora.features.write_cores` writes it.
        data: Text of the old task, whose cores are computed with the adapter `before`.
        weights: Number of leading singular directions of each base weight. Give at most one of `cores`, `data` and `weights`;
            by default the rows of A in `before` or, for full weights, the leading half of the singular vectors of `before`.
        model: Base model for `data`, or for `weights` on adapters; by default the one that the adapter names.

    Returns:
        What moved, by layer and overall, with a verdict on each condition of the rule.

    Raises:
        InvalidValue: The checkpoints or directions do not fit each other, or a file of a run is not what the run wrote.

    Example:
        >>> before, after, cores = checkpoints()
        >>> found = audit(before, after, cores=cores)
        >>> found.audited.overall.status
        'violated'
        >>> found.audited.overall.conditions["displacement"].preserved      # A did not move, but B did
        True
    """
    of_cores, of_data = (None if path is None else Path(path) for path in (cores, data))
    request = AuditRequest(cores=of_cores, data=of_data, weights=weights, model=model)
    if request.cores is not None:
        refuse_altered(request.cores)
    then, now = artifact_in(embedded(str(before), "base_model") or Path(before)), artifact_in(Path(after))
    if now.adapters:
        if then.kind == "model" and (then.folder / "config.json").is_file():  # a base model that had no adapter yet
            request = replace(request, model=model or str(then.folder))
        elif then.kind == "model":
            raise _unlike(now, then)
        return audit_adapters(then, now, request)
    if then.adapters:
        raise _unlike(then, now)
    return audit_weights(then.folder, now.folder, request)


def _unlike(adapter: Artifact, weights: Artifact) -> InvalidValue:
    return InvalidValue(
        f"{adapter.folder} is an adapter and {weights.folder} is not; compare two adapters, or merge the adapter into its base "
        "first (merge_and_unload, then save_pretrained)"
    )
