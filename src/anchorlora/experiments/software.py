"""What computes a run besides its recipe: versions of packages and the device, which may round otherwise when they change."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

COMPUTING = ("anchorlora", "torch", "transformers", "peft", "accelerate", "tokenizers")


def versions() -> dict[str, str]:
    """As a record has them."""
    found = {name: metadata.version(name) for name in (*COMPUTING, "safetensors")}
    return found | {"python": platform.python_version()}


def computing() -> dict[str, str]:
    """What a run that goes on must have in common with its beginning."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {name: metadata.version(name) for name in COMPUTING} | {"device": device}
