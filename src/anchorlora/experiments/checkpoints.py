"""Full weights on disk, read as data: one safetensors file or the shards of an index, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from anchorlora.adapters.indexed import INDEX, SINGLE, indexed, tensor_names
from anchorlora.adapters.tensors import opened_tensors
from anchorlora.strict import converting
from anchorlora.tasks.files import nearest_folders

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
        return Weights(place, indexed(place / INDEX))
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
    return Weights(place, dict.fromkeys(tensor_names(path), path))


def _refuse_pickle(path: Path) -> None:
    to = path.with_name(SINGLE if path.name.startswith("pytorch_model") else f"{path.stem}.safetensors")
    raise ValueError(f"{path} is a pickle, which is not opened here; convert it: {converting(path, to)}")
