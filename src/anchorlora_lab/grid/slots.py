"""A device for each of several runs at a time: its process sees one of those that this process sees.

    CUDA_VISIBLE_DEVICES   CUDA: numbers, or names that begin with GPU- or MIG-; also ROCm, where only this one is set
    HIP_VISIBLE_DEVICES    ROCm: numbers within ROCR_VISIBLE_DEVICES, which stays as it is
    ZE_AFFINITY_MASK       XPU: numbers, or parts of a device such as 0.1

Devices are taken from an inherited list. One run is one process.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from anchorlora.devices import accelerator, chosen
from anchorlora.errors import InvalidValue


@dataclass(frozen=True)
class Device:
    """One visible device."""

    variable: str | None  # the environment variable that names it for a process; None where there is none
    name: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which a process sees this device alone."""
        return {self.variable: self.name} if self.variable else {}


def devices_for(asked: str) -> list[Device]:
    """Return the devices that runs share."""
    device, there = chosen(asked), accelerator()
    if device.index is not None or there is None or there.type != device.type:
        return []
    count, variable = torch.accelerator.device_count(), _variable(device.type)
    selector = os.environ.get("ONEAPI_DEVICE_SELECTOR", "")
    # its numbers count what the mask leaves, so a mask of one device would leave none of them
    if device.type == "xpu" and count > 1 and any(c.isdigit() for c in selector.partition(":")[2]):
        raise InvalidValue(
            f"ONEAPI_DEVICE_SELECTOR={selector} picks devices by number, so none can be given to each run; "
            "give ZE_AFFINITY_MASK instead"
        )
    names = _visible_names(os.environ.get(variable) if variable else None, count)
    return [Device(variable, name) for name in names]


def slots_for(asked: str, wanted: int | None = None) -> int:
    """Return how many runs to work on at a time."""
    device, devices = chosen(asked), devices_for(asked)
    pinned = device.index is not None and device.type != "cpu"
    return wanted or (1 if pinned else len(devices) or os.cpu_count() or 1)


def freest(devices: Sequence[Device], taken: Sequence[Device | None]) -> Device | None:
    """Return the first of the devices that the fewest runs have."""
    runs = Counter(taken)
    return min(devices, key=lambda device: runs[device], default=None)


def _variable(kind: str) -> str | None:
    rocm = torch.version.hip and ("HIP_VISIBLE_DEVICES" in os.environ or "CUDA_VISIBLE_DEVICES" not in os.environ)
    return {"xpu": "ZE_AFFINITY_MASK", "cuda": f"{'HIP' if rocm else 'CUDA'}_VISIBLE_DEVICES"}.get(kind)


def _visible_names(inherited: str | None, count: int) -> list[str]:
    """The names in a list, as its runtime reads it: to the first negative one, and no numbers of devices that are not there."""
    if inherited is None:
        return [str(i) for i in range(count)]
    listed = filter(None, map(str.strip, inherited.split(",")))
    names = list(takewhile(lambda name: not name.startswith("-"), listed))
    return names[:count] if all(name.isdigit() for name in names) else names
