"""The shards of an index of weights: plain file names beside it, nothing elsewhere."""

from __future__ import annotations

from pathlib import Path

from anchorlora.adapters.tensors import opened_tensors
from anchorlora.strict import checked, load

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def indexed(index: Path) -> dict[str, Path]:
    """Tensor -> the shard that holds it.

    Raises ValueError for what is no index, for a shard that is missing, is no safetensors file beside it or lacks a tensor.
    """
    place = index.parent
    try:
        content = load(index)
        found = content.get("weight_map") if isinstance(content, dict) else None
        pairs = checked(found, dict[str, str], where="weight_map", remedy="fetch it again")
    except ValueError as error:
        raise ValueError(f"{index} is no index of shards: {error}") from None
    for shard in sorted(set(pairs.values())):
        if not is_beside(shard):
            raise ValueError(f"{index} names {shard!r}, which is no safetensors file beside it")
        if not (place / shard).is_file():
            missing = sum(other == shard for other in pairs.values())
            raise ValueError(f"{place / shard} is missing, and {missing} tensors with it; fetch the checkpoint again")
        lost = {tensor for tensor, other in pairs.items() if other == shard} - set(tensor_names(place / shard))
        if lost:
            raise ValueError(
                f"{place / shard} does not hold {min(lost)}, which {index.name} expects there; fetch the checkpoint again"
            )
    return {tensor: place / shard for tensor, shard in pairs.items()}


def is_beside(name: str, *, ending: str = ".safetensors") -> bool:
    """Whether a name is that of a file in the same folder, of this kind."""
    return Path(name).name == name and "\\" not in name and name.endswith(ending)


def tensor_names(path: Path) -> list[str]:
    with opened_tensors(path) as file:
        return list(file.keys())
