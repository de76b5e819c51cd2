"""Cores on disk, and reading tensors from a safetensors file as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from anchorlora.errors import InvalidType, InvalidValue
from anchorlora.geometry import Subspace
from anchorlora.schemas.json import Unreadable, checked, loads
from anchorlora.storage.files import new_file
from anchorlora.storage.tensors import opened_tensors, refuse_not_finite


def write_cores(
    path: Path | str,
    cores: Mapping[str, Subspace],
    *,
    stores: Mapping[str, str] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write protected directions as a file that `read_cores` and the commands' `--cores` take: safetensors, float32.

    cores     adapted layer -> directions (d_in, k), as `Anchor.of` takes them
    path      must not exist yet
    stores    layer -> the layer whose tensor it shares; by default layers share the tensor where they share the `Subspace`
    origin    what the header says of where they come from: names and JSON values

    Raises ValueError or TypeError for what makes no such file; nothing is written then.
    """
    stores, path = stores or _shared(cores), Path(path)
    wrong = next((layer for layer, core in cores.items() if not isinstance(core, Subspace)), None)
    if wrong is not None or not cores:
        found = f"{wrong} has a {type(cores[wrong]).__name__}" if wrong is not None else "there is none"
        raise InvalidType(f"a file of cores holds a Subspace for each adapted layer, but {found}; make one with Subspace(basis)")
    tensors = {store: cores[store].basis.detach().float().cpu().contiguous() for store in dict.fromkeys(stores.values())}
    refuse_not_finite(tensors, where=path)
    header = {"layers": json.dumps(stores)}
    if origin is not None:
        try:
            header["origin"] = json.dumps(origin, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"the origin of cores holds what JSON has no word for: {error}") from None
    with new_file(path) as temporary:
        temporary.write_bytes(_ordered(save(tensors, metadata=header)))


def _shared(cores: Mapping[str, Subspace]) -> dict[str, str]:
    """Each layer and the first one that has the same core."""
    first: dict[int, str] = {}
    return {layer: first.setdefault(id(core), layer) for layer, core in cores.items()}


def read_cores(path: Path | str) -> dict[str, Subspace]:
    """The protected directions of a file of cores, by adapted layer: float32, (d_in, k) each, as `Anchor.of` takes them.

    Such files are tasks/*/cores.safetensors of a run, and what `anchorlora cores` and `write_cores` make. Raises ValueError that
    names the file for one that is none.
    """
    path = Path(path)
    tensors = read_tensors(path)
    with opened_tensors(path) as file:
        layers = (file.metadata() or {}).get("layers")
    try:
        stores = checked(loads(layers or ""), dict[str, str], where=str(path), remedy="make it again")
    except ValueError:
        raise InvalidValue(f"{path} is no file of cores: its header names no sites") from None
    lost = sorted(set(stores.values()) - set(tensors))
    if lost:
        raise InvalidValue(f"{path} is no file of cores: its header names {lost[0]!r:.80}, which it does not hold")
    bases = {store: basis_in(tensor, f"{path}: the core of {store!r:.80}") for store, tensor in tensors.items()}
    return {layer: bases[store] for layer, store in stores.items()}


def basis_in(basis: Tensor, where: str) -> Subspace:
    """A basis as a file has it.  Raises ValueError that says where, for one that protects nothing."""
    try:
        return Subspace(basis)
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{where}: {error}") from None


def read_origin(path: Path) -> dict[str, Any]:
    """What a file of cores says of where they come from, as `anchorlora cores` writes it; empty where it says nothing."""
    with opened_tensors(path) as file:
        text = (file.metadata() or {}).get("origin", "{}")
    try:
        found = loads(text)
    except Unreadable:
        raise InvalidValue(f"{path} is no file of cores as this program writes them: its origin is not readable") from None
    return found if isinstance(found, dict) else {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file.  Raises ValueError that names it where it is not readable, NotFinite for what is no number."""
    with opened_tensors(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    refuse_not_finite(tensors, where=path)
    return tensors


def _ordered(content: bytes) -> bytes:
    """A safetensors file with its metadata sorted: the library's order differs from process to process."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + content[8 + size :]
