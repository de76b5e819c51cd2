"""Read and write safetensors files, whoever wrote them, as data.

The shards of an index are plain file names beside it, nothing elsewhere. Full weights are one safetensors file or the shards of an
index, read one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anchorlora.errors import InvalidValue, NotFinite
from anchorlora.paths import nearest
from anchorlora.store.files import naming
from anchorlora.store.json import checked, converting, load

# besides its own error, the library raises these for kinds of numbers that it or torch does not know
RAISED = (SafetensorError, AttributeError, KeyError, MemoryError, OSError, OverflowError, RuntimeError)


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    """Yield an open file of tensors."""
    if not path.is_file():
        raise InvalidValue(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except RAISED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidValue(f"{path} is not a readable safetensors file: {reason:.200}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file of finite numbers."""
    refuse_not_finite(tensors, where=path)
    with naming(path):
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, metadata=metadata)


def refuse_not_finite(tensors: Mapping[str, Tensor], *, where: Path) -> None:
    """Refuse tensors that hold NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize > 1 and not bool(torch.isfinite(tensor).all()):
            raise NotFinite(f"{where}: {name} holds NaN or infinite values")


PEFTS = "base_model.model."  # what PEFT puts before the path of a layer
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def indexed(index: Path) -> dict[str, Path]:
    """Return which shard holds each tensor of an index."""
    folder = index.parent
    try:
        content = load(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        pairs = checked(weight_map, dict[str, str], where="weight_map", remedy="fetch it again")
    except ValueError as error:
        raise InvalidValue(f"{index} is not an index of shards: {error}") from None
    for shard in sorted(set(pairs.values())):
        if not is_beside(shard):
            raise InvalidValue(f"{index} names {shard!r}, which is not a safetensors file next to it")
        if not (folder / shard).is_file():
            missing = sum(other == shard for other in pairs.values())
            raise InvalidValue(f"{folder / shard} is missing, and {missing} tensors with it; fetch the checkpoint again")
        if lost := {tensor for tensor, other in pairs.items() if other == shard} - set(tensor_names(folder / shard)):
            raise InvalidValue(
                f"{folder / shard} does not hold {min(lost)}, which {index.name} expects there; fetch the checkpoint again"
            )
    return {tensor: folder / shard for tensor, shard in pairs.items()}


def is_beside(name: str, *, ending: str = ".safetensors") -> bool:
    """Return True if a name is that of a file in the same folder, with the right ending."""
    return Path(name).name == name and "\\" not in name and name.endswith(ending)


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a file."""
    with opened_tensors(path) as file:
        return list(file.keys())


LOOKUPS = ("emb", "wte", "wpe")  # parts of names of modules that look rows up and multiply nothing


def is_lookup(name: str) -> bool:
    """Return True for the name of a table of embeddings."""
    return any(part in name.removesuffix(".weight").rpartition(".")[2] for part in LOOKUPS)


PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, eq=False)
class Weights:
    """A checkpoint of full weights."""

    place: Path  # model folder or safetensors file
    files: Mapping[str, Path]  # tensor name -> the file that holds it
    tied: Mapping[str, str] = field(default_factory=dict)  # tensor name -> the tensor that it is the same as

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
        with opened_tensors(self._file_of(name)) as file:
            return file.get_tensor(self.tied.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header alone."""
        with opened_tensors(self._file_of(name)) as file:
            return tuple(file.get_slice(self.tied.get(name, name)).get_shape())

    def _file_of(self, name: str) -> Path:
        if name not in self.files:
            raise InvalidValue(f"{self.place} holds no {name}")
        return self.files[name]

    def is_linear(self, name: str) -> bool:
        """Return True for a matrix that multiplies its input: named weight, two axes, no table of embeddings."""
        return name.endswith(".weight") and len(self.shape(name)) == 2 and not is_lookup(name)

    @cached_property
    def by_inputs(self) -> set[str]:
        """Names of the matrices that are stored as (d_in, d_out), as in Conv1D: a bias is as long as the second axis."""
        pairs = {name: f"{name.removesuffix('weight')}bias" for name in self.files if self.is_linear(name)}
        sides = {name: (self.shape(name), self.shape(bias)) for name, bias in pairs.items() if bias in self.files}
        by_inputs = {name for name, (shape, bias) in sides.items() if bias == shape[1:]}
        # a square weight with a bias is stored as the others are
        return by_inputs if any(shape[0] != shape[1] for shape, _ in (sides[name] for name in by_inputs)) else set()

    def weight_of(self, layer: str) -> Tensor:
        """Return the weight of a module, (d_out, d_in)."""
        parts = f"{layer}.weight".split(".")
        for start in range(len(parts) - 1):
            name = ".".join(parts[start:])
            if name in self.files:
                return self.read(name).T if name in self.by_inputs else self.read(name)
        raise InvalidValue(f"{self.place} holds no weight of {layer}; the adapter belongs to another model")


def open_weights(path: Path) -> Weights:
    """Open the weights of a model folder or of one safetensors file."""
    if path.is_file():
        return _single(path, path)
    if not path.is_dir():
        raise InvalidValue(f"there is nothing at {path}{nearest(path)}")
    single = (path / SINGLE).is_file()  # comes before an index, which an earlier save may have left
    if not single and (path / INDEX).is_file():
        return Weights(path, indexed(path / INDEX))
    files = [path / SINGLE] if single else sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _single(path, files[0])
    if files:
        raise InvalidValue(
            f"{path} holds {len(files)} safetensors files and no {INDEX} to say which belong together; give one file"
        )
    pickled = sorted(p for p in path.iterdir() if p.suffix in PICKLES)
    if len(pickled) == 1:
        _refuse_pickle(pickled[0])
    if pickled:
        load = f"M.from_pretrained({str(path)!r}, dtype='auto').save_pretrained({str(path) + '-safetensors'!r})"
        raise InvalidValue(
            f"{path} holds pickles, which are not opened here; convert them: "
            f'python -c "from transformers import AutoModelForCausalLM as M; {load}"'
        )
    raise InvalidValue(f"{path} holds neither an adapter nor safetensors weights; give the folder of a saved adapter or model")


def _single(given: Path, path: Path) -> Weights:
    if path.suffix in PICKLES:
        _refuse_pickle(path)
    names = tensor_names(path)
    if part := next((name for name in names if name.startswith(PEFTS)), None):
        raise InvalidValue(
            f"{path} holds {part}, which is part of an adapter and no weight of a model; give the adapter's folder, with its "
            "adapter_config.json"
        )
    return Weights(given, dict.fromkeys(names, path))


def _refuse_pickle(path: Path) -> None:
    to = path.with_name(SINGLE if path.name.startswith("pytorch_model") else f"{path.stem}.safetensors")
    raise InvalidValue(f"{path} is a pickle, which is not opened here; convert it: {converting(path, to)}")
