"""Differences between devices: the CPU, "cuda" (also ROCm's), Intel's "xpu", Apple's "mps".

Float64 arithmetic runs on a tensor's own device, or on the CPU if that device has no float64 (MPS, some XPUs). `in_float64`,
`float64_device` and `placed` ensure this for the whole library, which makes float64 tensors nowhere else.

Arithmetic that a training loop cannot lower: constraints act and are measured in true float32 and float64. Hard constraints
compute in float64, which nothing lowers. Penalties compute in float32: autocast would turn its products into bfloat16, and torch's
matmul precision into TF32 on a GPU or bfloat16 on a CPU that has it.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        """torch, imported where it is first used: what lists methods or reads records does not wait for it."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container, in both versions


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that torch finds here, without an index; None if there is only the CPU."""
    return torch.accelerator.current_accelerator(check_available=True)


def chosen(name: str) -> torch.device:
    """Return the device that a recipe names."""
    if name == "auto":
        return accelerator() or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise InvalidValue(f"no device is called {name!r}; give cpu, cuda, cuda:0, xpu, mps or auto") from None


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name of an accelerator, or the kind of device if torch has none."""
    if device.type == "mps":
        return getattr(torch.backends.mps, "get_name", lambda: "mps")()  # torch 2.7 has no name of it
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return ask(device) if ask else device.type


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type without "torch."."""
    return str(dtype).removeprefix("torch.")


def has_bfloat16(device: torch.device) -> bool:
    """Return True if an accelerator reports that it computes in bfloat16; False for the CPU, which is not asked."""
    ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return device.type != "cpu" and bool(ask and ask())


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return True on a CPU that has instructions for products in bfloat16, of which torch makes use."""
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device.type == "cpu" and any(ask() for ask in asked if ask is not None)


def allocated_at_most(device: torch.device) -> int:
    """Return the peak number of bytes that this process has held on an accelerator; 0 if torch does not count them."""
    ask = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return ask(device) if ask else 0


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device or, for the CPU and MPS, of the machine or its container; None if unknown."""
    if device.type in ("cpu", "mps"):
        import psutil  # which takes a while

        limits = [text for file in LIMITS if (text := _text_of(file).strip()).isdecimal()]
        return min(int(psutil.virtual_memory().available), *map(int, limits))
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return int(ask(device)[0]) if ask else None


@cache
def reuse_freed_memory() -> None:
    """Let glibc keep memory that is freed for the next tensors; the system would clear it again, a twentieth of a step on a CPU."""
    if sys.platform == "linux" and (tune := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1)):
            tune(option, value)


def _text_of(file: str) -> str:
    """Text of a file of the system; "" where there is none."""
    try:
        with open(file, encoding="ascii") as opened:
            return opened.read()
    except OSError:
        return ""


def in_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, on a device that can compute with it."""
    return x.double() if _has_float64(x.device) else x.cpu().double()


def second_moment(rows: Tensor, thin: Tensor | None = None) -> Tensor:
    """Return X^T X (d, d) of rows X (n, d), or its product with (d, q); on the CPU, NumPy computes half of a symmetric product."""
    if rows.device.type != "cpu":
        return rows.T @ (rows if thin is None else rows @ thin)
    X = rows.numpy()
    with _blas_threads():
        return torch.from_numpy(X.T @ (X if thin is None else X @ thin.numpy()))


def eigenvectors(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (d,), the smallest first, and eigenvectors (d, d); on the CPU, NumPy takes three quarters of the time."""
    if symmetric.device.type != "cpu":
        return tuple(torch.linalg.eigh(symmetric))
    import numpy as np

    with _blas_threads():
        values, vectors = np.linalg.eigh(symmetric.numpy())
    return torch.from_numpy(values), torch.from_numpy(vectors)


def _blas_threads() -> AbstractContextManager[object]:
    """Let NumPy compute on as many threads as torch, as a recipe and a resumed run ask for: another number rounds differently."""
    return _blas().limit(limits=torch.get_num_threads(), user_api="blas")


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64 arithmetic with tensors of a given device: that device, or the CPU if it has no float64."""
    return device if _has_float64(device) else torch.device("cpu")


def placed(x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor in another type and on another device; the CPU does the conversion if it is one of the two."""
    if x.dtype == dtype and x.device == device:  # as at every step
        return x
    return x.to(device).to(dtype) if device.type == "cpu" else x.to(dtype).to(device)


@cache
def _has_float64(device: torch.device) -> bool:
    if device.type in ("cpu", "cuda"):
        return True
    try:
        torch.ones(1, device=device).double().add_(1)  # some XPUs store float64 but cannot add it
    except (TypeError, RuntimeError):
        return False
    return True


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators that dropout draws from while a model is on a device, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_generator_states(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Restore what `generator_states` returned; a kind of device that is missing there or not used here is left alone."""
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


@contextmanager
def forked_generators() -> Iterator[None]:
    """Run a block and restore the random generators of the CPU and of all accelerators after it."""
    found = accelerator()
    indices = range(torch.accelerator.device_count()) if found else ()
    with torch.random.fork_rng(indices, device_type=found.type if found else "cpu"):
        yield


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Run a block without gradients and without dropout of a model, which trains afterwards if it did before."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def product_precision() -> tuple[str, ...]:
    """Return how float32 products are computed: on CUDA and on the CPU, or, before torch 2.9, one word for both."""
    if hasattr(torch.backends.mkldnn, "matmul"):
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    return (torch.get_float32_matmul_precision(),)


def set_product_precision(words: Sequence[str]) -> None:
    """Set how float32 products are computed."""
    if len(words) == 1:
        torch.set_float32_matmul_precision(words[0])
    else:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = words  # type: ignore[attr-defined]


SIGNALS = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")]


class Uninterrupted:
    """Run a block to its end: a signal that comes meanwhile, such as Ctrl-C, is handled after it, as only the main thread can."""

    passing = False  # whether a signal is handled at once after all

    def __enter__(self) -> Uninterrupted:
        self.handlers: dict[int, Any] = {}
        self.came: list[tuple[int, FrameType | None]] = []
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self.handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # of a signal in between
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        except BaseException:  # of a signal in between
            self._restore()
            raise
        came, self.came = self.came, []
        for number, frame in came:
            self.handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.passing:
            self.passing = False  # what the first one interrupts is cleaned up to its end
            self.handlers[number](number, frame)
        else:
            self.came.append((number, frame))

    def _restore(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


@contextmanager
def true_precision(devices: Collection[str]) -> Iterator[Uninterrupted]:
    """Run a block without gradients, autocast or lowered float32 products, whatever the loop has set, and restore the settings. A
    signal is handled after the block.
    """
    before = product_precision()
    with Uninterrupted() as signals, ExitStack() as off:
        off.enter_context(torch.no_grad())
        for device in devices:
            if torch.amp.is_autocast_available(device):
                off.enter_context(torch.autocast(device, enabled=False))
        try:  # the outer one, since the one signal that passes may come within the inner `finally`
            try:
                set_product_precision(("ieee",) * len(before) if len(before) > 1 else ("highest",))
                yield signals
            finally:
                signals.passing = False
                set_product_precision(before)
        finally:
            set_product_precision(before)
