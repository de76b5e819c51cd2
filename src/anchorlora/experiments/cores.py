"""Cores on disk, and reading tensors from a safetensors file as data."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anchorlora.geometry import Subspace


def write_cores(path: Path, cores: dict[str, Subspace], stores: dict[str, str]) -> None:
    """Cores as float32 (d_in, k), one tensor a store; the header says which layer uses which."""
    tensors = {store: cores[store].basis.float().contiguous() for store in dict.fromkeys(stores.values())}
    save_file(tensors, path, metadata={"sites": json.dumps(stores)})


def read_cores(path: Path) -> dict[str, Subspace]:
    """Cores by adapted layer.  Raises ValueError that names the file for one that is none."""
    tensors = read_tensors(path)
    with safe_open(path, framework="pt") as file:
        sites = (file.metadata() or {}).get("sites")
    try:
        stores = json.loads(sites or "")
        bases = {store: Subspace(tensor) for store, tensor in tensors.items()}
        return {str(layer): bases[store] for layer, store in stores.items()}
    except (json.JSONDecodeError, AttributeError, KeyError):
        raise ValueError(f"{path} is no file of cores: its header names no sites") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from None
