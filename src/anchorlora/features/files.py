"""Files of protected subspaces: tensors in safetensors, read as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from anchorlora.errors import InvalidType, InvalidValue
from anchorlora.geometry import LayerCore, Subspace
from anchorlora.store.files import new_file
from anchorlora.store.json import read_json
from anchorlora.store.tensors import opened_tensors, refuse_not_finite


def write_cores(
    path: Path | str,
    cores: Mapping[str, Subspace | LayerCore],
    *,
    stores: Mapping[str, str] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write protected subspaces to a safetensors file that `read_cores` and the commands' `--cores` option read.

    Args:
        path: New file; an existing one is not overwritten.
        cores: Adapted layer -> protected subspace (d_in, k), as `Anchor.of` takes them. Stored in float32.
        stores: Layer -> layer whose tensor it shares. By default, layers share a tensor if they share the `Subspace` object.
        origin: Description of the source for the file's header, as JSON values.

    Raises:
        InvalidType: A value is neither a `Subspace` nor a `LayerCore`, or there is none.
        InvalidValue: `origin` cannot be written as JSON.
        NotFinite: A basis holds NaN or infinite values. Nothing is written in any of these cases.

    Example:
        >>> from anchorlora import Subspace
        >>> from anchorlora.features import read_cores, write_cores
        >>> path = "model.layers.0.self_attn.q_proj"
        >>> write_cores(tmp / "cores.safetensors", {path: Subspace(torch.eye(32)[:, :4])}, origin={"task": "news"})
        >>> read_cores(tmp / "cores.safetensors")[path].k
        4
    """
    bases = {layer: core.core if isinstance(core, LayerCore) else core for layer, core in cores.items()}
    stores, path = stores or first_layers(bases), Path(path)
    wrong = next((layer for layer, core in bases.items() if not isinstance(core, Subspace)), None)
    if wrong is not None or not bases:
        problem = f"{wrong} has a {type(bases[wrong]).__name__}" if wrong is not None else "there is none"
        raise InvalidType(f"a file of cores holds a Subspace for each adapted layer, but {problem}; make one with Subspace(basis)")
    if (numbers := next((layer for layer, core in bases.items() if core.tokens is not None), None)) is not None:
        raise InvalidType(f"{numbers} has numbers of tokens, and a file of cores holds directions; leave it out")
    tensors = {store: bases[store].basis.detach().float().cpu().contiguous() for store in dict.fromkeys(stores.values())}
    refuse_not_finite(tensors, where=path)
    header = {"layers": json.dumps(stores)}
    if origin is not None:
        try:
            header["origin"] = json.dumps(origin, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"the origin of cores cannot be written as JSON: {error}") from None
    with new_file(path) as temporary:
        temporary.write_bytes(_sort_metadata(save(tensors, metadata=header)))


def first_layers(cores: Mapping[str, Any]) -> dict[str, str]:
    """Return for each layer the first one that has the same core."""
    first: dict[int, str] = {}
    return {layer: first.setdefault(id(core), layer) for layer, core in cores.items()}


def read_cores(path: Path | str) -> dict[str, Subspace]:
    """Read the protected subspaces of a file, as `Anchor.of` takes them.

    Such files are made by `write_cores`, by `anchorlora cores`, and by a run (tasks/*/cores.safetensors).

    Args:
        path: A safetensors file of cores.

    Returns:
        Adapted layer -> protected subspace (d_in, k), float32.

    Raises:
        InvalidValue: The file is missing, unreadable, or not a file of cores.
        NotFinite: It holds NaN or infinite values.

    Example:
        >>> from anchorlora import Anchor
        >>> from anchorlora.features import read_cores, write_cores
        >>> model = tiny()
        >>> write_cores(tmp / "cores.safetensors", cores_of(model, k=3))
        >>> anchor = Anchor.of(model, cores=read_cores(tmp / "cores.safetensors"))
        >>> [layer.core.k for layer in anchor.layers]
        [3, 3, 3, 3]
    """
    path = Path(path)
    tensors = read_tensors(path)
    with opened_tensors(path) as file:
        header = file.metadata() or {}
    layers = header.get("layers", header.get("sites"))  # their name in files of record schema 1
    try:
        stores = read_json(layers or "", dict[str, str], where=str(path), remedy="make it again")
    except ValueError:
        raise InvalidValue(f"{path} is not a file of cores: its header names no layers") from None
    if lost := sorted(set(stores.values()) - set(tensors)):
        raise InvalidValue(f"{path} is not a file of cores: its header names {lost[0]!r:.80}, which the file does not contain")
    bases = {store: basis_in(tensor, f"{path}: the core of {store!r:.80}") for store, tensor in tensors.items()}
    return {layer: bases[store] for layer, store in stores.items()}


def basis_in(basis: Tensor, where: str) -> Subspace:
    """Make a `Subspace` of a tensor from a file."""
    try:
        return Subspace(basis)
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{where}: {error}") from None


def read_origin(path: Path) -> dict[str, Any]:
    """Read the description of the source from the header of a file of cores."""
    with opened_tensors(path) as file:
        text = (file.metadata() or {}).get("origin", "{}")
    return read_json(text, dict[str, Any], where=f"{path}: its origin", remedy="make it again")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file."""
    with opened_tensors(path) as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # else it keeps the file mapped
    refuse_not_finite(tensors, where=path)
    return tensors


def _sort_metadata(content: bytes) -> bytes:
    """A safetensors file with its metadata sorted: the library's order differs from process to process."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + content[8 + size :]
