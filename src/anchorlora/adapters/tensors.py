"""Safetensors files of whoever wrote them, as data."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anchorlora.errors import NotFinite

# besides its own error, the library raises these for kinds of numbers that it or torch does not know
RAISED = (SafetensorError, AttributeError, KeyError, MemoryError, OSError, OverflowError, RuntimeError)


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    """An open file of tensors.  Raises ValueError that names it when it is missing or not readable, also while the block reads."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except RAISED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is not a readable safetensors file: {reason:.200}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of finite numbers.  Raises OSError that names the file where the system refuses the write."""
    refuse_not_finite(tensors, where=path)
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, metadata=metadata)
    except SafetensorError as error:
        refused = re.search(r"os error (\d+)", str(error))
        if refused is None:
            raise
        raise OSError(int(refused[1]), os.strerror(int(refused[1])), str(path)) from None


def refuse_not_finite(tensors: Mapping[str, Tensor], *, where: Path) -> None:
    """Raises NotFinite that names the file and the first tensor that holds what is no number."""
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize > 1 and not bool(torch.isfinite(tensor).all()):
            raise NotFinite(f"{where}: {name} holds NaN or infinite values")
