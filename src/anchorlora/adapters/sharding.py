"""Factors that are split over processes, as FSDP2 splits them: each process holds some rows of A, and some of B.

A <- A P works on rows alone, so every process projects its own rows and nothing is sent. What else holds the factors in pieces
(FSDP1's flat parameters, DeepSpeed's partitions, columns of tensor parallelism) is refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from anchorlora.errors import InvalidType

ZERO = "DeepSpeed ZeRO keeps factors in flat partitions, which cannot be protected; use FSDP2 (fully_shard) or DDP"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of the tensor."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """The rows that this process holds, sharing memory with the tensor; the tensor itself where it is whole.

    Raises TypeError where it is split otherwise than by rows over one dimension of processes.
    """
    if hasattr(tensor, "ds_id"):  # what ZeRO-3 has taken over
        raise InvalidType(ZERO)
    if not is_sharded(tensor):
        return tensor
    place = tensor.placements[0]
    if len(tensor.placements) != 1 or not (place.is_replicate() or place.is_shard(0)):
        raise InvalidType(
            f"factors can be protected where processes split them by rows (FSDP2), not as {tensor.placements}; "
            "keep LoRA modules out of tensor parallelism"
        )
    return tensor.to_local()


def refuse_flat_parameters(model: nn.Module) -> None:
    """FSDP1 and DeepSpeed keep factors inside flat buffers, where a projection has no rows to work on."""
    for module in model.modules():
        home = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
        if any(name.startswith(FSDP1) for name in home):
            raise InvalidType("FSDP1 keeps factors in flat parameters, which cannot be protected; use fully_shard (FSDP2) or DDP")
        if any(name.startswith("deepspeed.") for name in home):
            raise InvalidType(ZERO)
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise InvalidType(ZERO)
