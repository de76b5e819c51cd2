"""What computes a run besides its recipe, and may round otherwise when it changes: versions of packages and the device."""

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
    packages = {name: metadata.version(name) for name in COMPUTING}
    if torch.cuda.is_available():
        return packages | {"device": torch.cuda.get_device_name()}
    return packages | {"device": "cpu", "instructions": torch.backends.cpu.get_cpu_capability()}
