"""Full weights on disk, read as data: one safetensors file or the shards of an index, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from anchorlora.adapters.tensors import opened_tensors
from anchorlora.strict import checked, converting, load
from anchorlora.tasks.files import nearest_folders

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, eq=False)
class Weights:
    """A checkpoint: where it lies, and the file of each tensor."""

    place: Path
    files: Mapping[str, Path]

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU.  Raises ValueError that names the file when it is not there or damaged."""
        with opened_tensors(self._file_of(name)) as file:
            return file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header alone."""
        with opened_tensors(self._file_of(name)) as file:
            return tuple(file.get_slice(name).get_shape())

    def _file_of(self, name: str) -> Path:
        if name not in self.files:
            raise ValueError(f"{self.place} holds no {name}")
        return self.files[name]

    def weight_of(self, layer: str) -> Tensor:
        """The weight of a module by its path; files of a model without its head leave out the first part of the path."""
        parts = f"{layer}.weight".split(".")
        for start in range(len(parts) - 1):
            name = ".".join(parts[start:])
            if name in self.files:
                return self.read(name)
        raise ValueError(f"{self.place} holds no weight of {layer}; the adapter belongs to another model")


def open_weights(place: Path) -> Weights:
    """The weights of a model folder or of one safetensors file.  Raises ValueError for pickles, missing shards and other files."""
    if place.is_file():
        return _single(place, place)
    if not place.is_dir():
        raise ValueError(f"there is nothing at {place}{nearest_folders(place)}")
    if (place / INDEX).is_file():
        return _sharded(place)
    found = [place / SINGLE] if (place / SINGLE).is_file() else sorted(place.glob("*.safetensors"))
    if len(found) == 1:
        return _single(place, found[0])
    if found:
        raise ValueError(
            f"{place} holds {len(found)} safetensors files and no {INDEX} that says which belong together; give one file"
        )
    pickled = sorted(p for p in place.iterdir() if p.suffix in PICKLES)
    if len(pickled) == 1:
        _refuse_pickle(pickled[0])
    if pickled:
        load = f"M.from_pretrained({str(place)!r}, dtype='auto').save_pretrained({str(place) + '-safetensors'!r})"
        raise ValueError(
            f"{place} holds pickles, which are not opened here; convert them: "
            f'python -c "from transformers import AutoModelForCausalLM as M; {load}"'
        )
    raise ValueError(f"{place} holds neither an adapter nor safetensors weights; give the folder of a saved adapter or model")


def _single(place: Path, path: Path) -> Weights:
    if path.suffix in PICKLES:
        _refuse_pickle(path)
    return Weights(place, dict.fromkeys(_names(path), path))


def _sharded(place: Path) -> Weights:
    """The shards that an index names: plain file names beside it, nothing elsewhere."""
    index = place / INDEX
    try:
        content = load(index)
        found = content.get("weight_map") if isinstance(content, dict) else None
        pairs = checked(found, dict[str, str], where="weight_map", remedy="fetch it again")
    except ValueError as error:
        raise ValueError(f"{index} is no index of shards: {error}") from None
    for shard in sorted(set(pairs.values())):
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{index} names {shard!r}, which is no safetensors file beside it")
        if not (place / shard).is_file():
            missing = sum(other == shard for other in pairs.values())
            raise ValueError(f"{place / shard} is missing, and {missing} tensors with it; fetch the checkpoint again")
        lost = {tensor for tensor, other in pairs.items() if other == shard} - set(_names(place / shard))
        if lost:
            raise ValueError(f"{place / shard} does not hold {min(lost)}, which {INDEX} expects there; fetch the checkpoint again")
    return Weights(place, {tensor: place / shard for tensor, shard in pairs.items()})


def _names(path: Path) -> list[str]:
    with opened_tensors(path) as file:
        return list(file.keys())


def _refuse_pickle(path: Path) -> None:
    to = path.with_name(SINGLE if path.name.startswith("pytorch_model") else f"{path.stem}.safetensors")
    raise ValueError(f"{path} is a pickle, which is not opened here; convert it: {converting(path, to)}")
