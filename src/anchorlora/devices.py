"""What differs from one kind of device to another: the CPU, "cuda" (ROCm's too), Intel's "xpu", Apple's "mps".

Float64 arithmetic is done on a tensor's own device, or on the CPU where that device has no float64 (MPS, some XPUs). `in_float64`,
`float64_device` and `placed` see to it for the whole library, which makes float64 tensors nowhere else.

Arithmetic that a loop cannot lower: constraints act and are looked at in true float32 and float64.

Hard constraints compute in float64, which nothing lowers. Penalties compute in float32: autocast would turn its products into
bfloat16, and torch's matmul precision into TF32 on a GPU or into bfloat16 on a CPU that has it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING

from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    import torch
    from torch import Tensor


LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def accelerator() -> torch.device | None:
    """The kind of accelerator that torch finds here, without an index; None where there is only the CPU."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True)


def chosen(name: str) -> torch.device:
    """The device of a recipe; "auto" is the accelerator, or the CPU.  Raises ValueError for a name that torch does not know."""
    import torch

    if name == "auto":
        return accelerator() or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise InvalidValue(f"no device is called {name!r}; give cpu, cuda, cuda:0, xpu, mps or auto") from None


def device_name(device: torch.device) -> str:
    """What the maker calls a GPU; the kind of device where nobody says."""
    import torch

    if device.type == "mps":
        return torch.backends.mps.get_name()
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return ask(device) if ask else device.type


def has_bfloat16(device: torch.device) -> bool:
    """Whether an accelerator says that it computes in bfloat16; a CPU is not asked."""
    import torch

    ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return device.type != "cpu" and bool(ask and ask())


def allocated_at_most(device: torch.device) -> int:
    """The most bytes that this process has held on an accelerator; 0 where nobody counts them."""
    import torch

    ask = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return ask(device) if ask else 0


def in_float64(x: Tensor) -> Tensor:
    """The same numbers in float64, where arithmetic with them is done."""
    return x.double() if _has_float64(x.device) else x.cpu().double()


def float64_device(device: torch.device) -> torch.device:
    """Where float64 arithmetic is done for the tensors of a device."""
    import torch

    return device if _has_float64(device) else torch.device("cpu")


def placed(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor in another type and on another device, converted on the CPU if it comes from there or goes there."""
    if x.dtype == dtype and x.device == device:  # as at every step
        return x
    return x.to(device).to(dtype) if device.type == "cpu" else x.to(dtype).to(device)


@cache
def _has_float64(device: torch.device) -> bool:
    if device.type in ("cpu", "cuda"):
        return True
    import torch

    try:
        torch.ones(1, device=device).double().add_(1)  # some XPUs hold what they cannot add
    except (TypeError, RuntimeError):
        return False
    return True


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that dropout draws from while a model is on a device, by kind of device."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generator_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Put back what `generator_states` gave; a kind that is missing or not used here is left alone."""
    import torch

    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


@contextmanager
def forked_generators() -> Iterator[None]:
    """Put the CPU's generator and those of all accelerators back after the block."""
    import torch

    found = accelerator()
    indices = range(torch.accelerator.device_count()) if found else ()
    with torch.random.fork_rng(indices, device_type=found.type if found else "cpu"):
        yield


@contextmanager
def true_precision(devices: Collection[str]) -> Iterator[None]:
    """Without gradients, autocast or lowered float32 products, whatever the loop has set; all of it is put back.

    devices: kinds of device ("cpu", "cuda", "xpu", "mps") whose autocast is left for the block.
    """
    import torch

    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [product.fp32_precision for product in products]
    with ExitStack() as off:
        off.enter_context(torch.no_grad())
        for device in devices:
            if torch.amp.is_autocast_available(device):
                off.enter_context(torch.autocast(device, enabled=False))
        try:
            for product in products:
                product.fp32_precision = "ieee"
            yield
        finally:
            for product, precision in zip(products, before, strict=True):
                product.fp32_precision = precision


def refuse_several_processes() -> None:
    """Raises ValueError where a launcher has started this process as one of several."""
    for name in LAUNCHED:
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise InvalidValue(
                f"a launcher has started {count} processes ({name}={count}), but a run takes one; "
                f"call anchorlora without torchrun, accelerate launch, mpirun or srun, or unset {name}"
            )
