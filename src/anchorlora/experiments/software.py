"""What computes a run besides its recipe, and may round otherwise when it changes: versions of packages and the device."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from anchorlora.devices import device_name

COMPUTING = ("anchorlora", "torch", "transformers", "peft", "accelerate", "tokenizers")


def versions() -> dict[str, str]:
    """As a record has them."""
    found = {name: metadata.version(name) for name in (*COMPUTING, "safetensors")}
    return found | {"python": platform.python_version()}


def computing(device: torch.device) -> dict[str, str]:
    """What a run on a device that goes on must have in common with its beginning."""
    packages = {name: metadata.version(name) for name in COMPUTING}
    if device.type != "cpu":
        return packages | {"device": device_name(device)}
    return packages | {"device": "cpu", "instructions": torch.backends.cpu.get_cpu_capability()}
