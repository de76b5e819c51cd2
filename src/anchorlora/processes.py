"""The processes of one run, as torchrun or accelerate launch starts them: each trains on its part of every window.

The frozen base model is whole in each process, or split over them (FSDP2). Factors are small and whole everywhere. Their gradients
are added up once a step, so every process takes the same step, and what constraints do needs no communication.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from anchorlora.devices import torch
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn

T = TypeVar("T")
OTHER_LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_SUMMED: ContextVar[bool] = ContextVar("summed", default=False)


def launched() -> int:
    """Return how many processes torchrun or accelerate launch has started together; 1 without a launcher."""
    return max(1, _number("WORLD_SIZE"))


def following() -> bool:
    """Return True in all processes but the first, which is the one that speaks and writes."""
    return launched() > 1 and _number("RANK") > 0


def refuse_several_processes() -> None:
    """Raise if a launcher has started this process as one of several."""
    _refuse(("WORLD_SIZE", *OTHER_LAUNCHERS), "this command starts runs of its own", "call it without a launcher")


def refuse_other_launchers() -> None:
    """Raise if the process is one of several that a run cannot join."""
    if launched() == 1:
        how = "start the run with torchrun or accelerate launch, or as one process"
        _refuse(OTHER_LAUNCHERS, "a run has no part for each", how)
    elif _is_on("ACCELERATE_USE_DEEPSPEED"):
        raise InvalidValue(
            "DeepSpeed keeps factors in flat partitions, which cannot be protected; choose DDP or FSDP2 for `accelerate launch`"
        )
    elif sharding() and _number("FSDP_VERSION", 1) != 2:
        raise InvalidValue("FSDP1 keeps weights in flat parameters; add --fsdp_version 2 to `accelerate launch`")


def sharding() -> bool:
    """Return True if the launcher asks for FSDP."""
    return launched() > 1 and _is_on("ACCELERATE_USE_FSDP")


def _refuse(variables: Sequence[str], why: str, remedy: str) -> None:
    for name in variables:
        if _number(name) > 1:
            raise InvalidValue(f"a launcher has started {_number(name)} processes ({name}={_number(name)}), but {why}; {remedy}")


def _number(variable: str, otherwise: int = 0) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else otherwise


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


@dataclass(frozen=True)
class Processes:
    """The processes that make one run together. All must call every method but `share`, in the same order."""

    rank: int = 0  # number of this process, from 0
    count: int = 1
    device: torch.device | str = "cpu"  # device of this process, on which tensors are exchanged
    sharded: bool = False  # whether the base model is split over the processes

    @property
    def first(self) -> bool:
        """True in the process that speaks and writes."""
        return self.rank == 0

    def share(self, items: int, rank: int | None = None) -> range:
        """Return a process's share of so many items: consecutive ones; shares differ by one item at most."""
        rank = self.rank if rank is None else rank
        each, left = divmod(items, self.count)
        begin = rank * each + min(rank, left)
        return range(begin, begin + each + (rank < left))

    def told(self, make: Callable[[], T]) -> T:
        """Return in all processes what the first one makes; an error that it raises is raised in all."""
        made: list[Any] = [self.together(lambda: make() if self.first else None)]
        if self.count > 1:
            torch.distributed.broadcast_object_list(made, src=0, device=torch.device(self.device))
        return made[0]

    def together(self, make: Callable[[], T]) -> T:
        """Return what this process makes, or raise in all processes what one of them raises."""
        if self.count == 1:
            return make()
        value: Any = None
        error: Exception | None = None
        try:
            value = make()
        except Exception as raised:
            error = raised
        if errors := [raised for raised in self.gathered(error) if raised is not None]:
            raise error or errors[0]
        return value

    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value)
        return found

    def sent_to_first(self, value: T) -> list[T]:
        """Return the values of all processes in the first one, and an empty list in the others."""
        if self.count == 1:
            return [value]
        found: list[Any] | None = [None] * self.count if self.first else None
        torch.distributed.gather_object(value, found, dst=0)
        return found or []

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set in any process."""
        if self.count == 1:
            return flag
        one = torch.tensor([float(flag)], device=self.device)
        torch.distributed.all_reduce(one)
        return bool(one.item())

    def agreed(self, why: str | None) -> str | None:
        """Return the text that the first process with one gives; None if all give None."""
        if self.count == 1 or not self.any(why is not None):
            return why
        return next(each for each in self.gathered(why) if each is not None)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all processes, in one exchange for each dtype."""
        if self.count == 1:
            return
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            alike = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.detach().flatten() for t in alike])
            torch.distributed.all_reduce(flat)
            for t, summed in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                t.copy_(summed.view_as(t))

    @contextmanager
    def in_step(self, model: nn.Module) -> Iterator[None]:
        """Let each process make as many forward passes of a split model as the busiest, since all gather its layers; idle ones are
        empty.
        """
        if not self.sharded:
            yield
            return
        if callable(inner := getattr(model, "get_base_model", None)):
            model = inner()  # generate() calls that one

        def announce(module: nn.Module, arguments: Any) -> None:
            self.any(True)

        with model.register_forward_pre_hook(announce, prepend=True):  # before FSDP gathers anything
            yield
        with torch.no_grad():
            while self.any(False):
                model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device), use_cache=False)


ALONE = Processes()


def accelerator_on(device: torch.device) -> Accelerator:
    """Return Accelerate's view of a device, for a loaded model; a process keeps its first Accelerate state, whatever its device."""
    from accelerate import Accelerator
    from accelerate.state import is_initialized

    fresh = not is_initialized()
    # the recipe's dtype is what a record names, so a launcher's mixed precision plays no part
    precision = "no" if fresh else None
    return Accelerator(cpu=fresh and device.type == "cpu", mixed_precision=precision, device_placement=False)


def processes_on(device: torch.device) -> Processes:
    """Return the processes that a launcher has started for one run, connected; one by itself without a launcher."""
    refuse_other_launchers()
    if launched() == 1:
        return ALONE
    if device.index is not None:
        raise InvalidValue(f"{launched()} processes cannot all use {device}; leave the number out, or set device=auto")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # or transformers reads nothing in all processes but one
    accelerator = accelerator_on(device)
    return Processes(accelerator.process_index, accelerator.num_processes, accelerator.device, sharding())


@contextmanager
def adding_up() -> Iterator[None]:
    """Say that the loop in the block adds gradients up itself, so no parameter needs a gradient for a wrapper that waits for it."""
    token = _SUMMED.set(True)
    try:
        yield
    finally:
        _SUMMED.reset(token)


def wrapped() -> bool:
    """Return True if processes train, even one alone, and a wrapper such as DistributedDataParallel exchanges their gradients."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and not _SUMMED.get()
