"""Factors that are split over processes, as FSDP2 splits them: each process holds some rows of A and some rows of B.

A <- A P works on each row alone, so every process projects its own rows and nothing is communicated. Everything else that splits
factors (FSDP1's flat parameters, DeepSpeed's partitions, columns of tensor parallelism) is refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from anchorlora.errors import InvalidType

ZERO = "DeepSpeed ZeRO keeps factors in flat partitions, which cannot be protected; use FSDP2 (fully_shard) or DDP"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def is_sharded(tensor: Tensor) -> bool:
    """Return True if this process holds only a part of the tensor."""
    return hasattr(tensor, "placements")


def is_split(model: nn.Module) -> bool:
    """Return True if FSDP2 has split any part of the model."""
    return any(cls.__name__ == "FSDPModule" for kind in {type(m) for m in model.modules()} for cls in kind.__mro__)


def call_with_hooks(model: nn.Module) -> None:
    """Let a PeftModel call the model in it with its hooks, in which FSDP2 gathers weights; PEFT 0.18 calls only `forward`."""
    inner: Any = model.get_base_model()  # type: ignore[operator]

    def forward(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    model.base_model.forward = forward  # type: ignore[union-attr]


def local(tensor: Any) -> Tensor:
    """Return the rows of a tensor that this process holds, sharing its memory; the tensor itself if it is whole."""
    if hasattr(tensor, "ds_id"):  # set by ZeRO-3
        raise InvalidType(ZERO)
    if not is_sharded(tensor):
        return tensor
    placement = tensor.placements[0]
    if len(tensor.placements) != 1 or not (placement.is_replicate() or placement.is_shard(0)):
        raise InvalidType(
            f"factors can be protected where processes split them by rows (FSDP2), not as {tensor.placements}; "
            "keep LoRA modules out of tensor parallelism"
        )
    return tensor.to_local()


def as_split(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every process has, split as another one is; nothing is exchanged."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]  # of a DTensor
    copied = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copied.redistribute(placements=like.placements)  # type: ignore[attr-defined]


def refuse_flat_parameters(model: nn.Module) -> None:
    """Raise where FSDP1 or DeepSpeed keeps factors in flat buffers: a projection has no rows to work on there."""
    for module in model.modules():
        home = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
        if any(name.startswith(FSDP1) for name in home):
            raise InvalidType("FSDP1 keeps factors in flat parameters, which cannot be protected; use fully_shard (FSDP2) or DDP")
        if any(name.startswith("deepspeed.") for name in home):
            raise InvalidType(ZERO)
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise InvalidType(ZERO)
