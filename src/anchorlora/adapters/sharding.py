"""Factors that are split over processes, as FSDP2 splits them: each process holds some rows of A, and some of B.

A <- A P works on rows alone, so every process projects its own rows and nothing is sent. What else holds the factors in pieces
(FSDP1's flat parameters, DeepSpeed's partitions, columns of tensor parallelism) is refused by name.

Several processes that train one model: they must start from the same factors and protect the same directions.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from anchorlora.adapters import Scope


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
        raise TypeError(ZERO)
    if not is_sharded(tensor):
        return tensor
    place = tensor.placements[0]
    if len(tensor.placements) != 1 or not (place.is_replicate() or place.is_shard(0)):
        raise TypeError(
            f"factors can be protected where processes split them by rows (FSDP2), not as {tensor.placements}; "
            "keep LoRA modules out of tensor parallelism"
        )
    return tensor.to_local()


def refuse_flat_parameters(model: nn.Module) -> None:
    """FSDP1 and DeepSpeed keep factors inside flat buffers, where a projection has no rows to work on."""
    for module in model.modules():
        home = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
        if any(name.startswith(FSDP1) for name in home):
            raise TypeError("FSDP1 keeps factors in flat parameters, which cannot be protected; use fully_shard (FSDP2) or DDP")
        if any(name.startswith("deepspeed.") for name in home):
            raise TypeError(ZERO)
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise TypeError(ZERO)


def processes() -> int:
    """How many processes train together; 1 where no process group was started."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def refuse_unlike_processes(scope: Scope) -> None:
    """Every process must hold the same cores and start, or they would drift apart without a word.  All processes must ask."""
    if processes() == 1:
        return
    from torch import distributed

    mine = _digests(scope)
    everyone: list[dict[str, str] | None] = [None] * processes()
    distributed.all_gather_object(everyone, mine)
    for other in everyone:
        for what, digest in (other or {}).items():
            if mine.get(what, digest) != digest:
                raise ValueError(
                    f"{what} differ between processes; make cores once and load the same file everywhere, "
                    "and wrap the model (DDP, fully_shard) before protecting it"
                )


def _digests(scope: Scope) -> dict[str, str]:
    """A hash of each thing that all processes must share; factors that are split are each process's own."""
    cores, factors = hashlib.sha256(), hashlib.sha256()
    for site in scope.sites:
        for directions in (site.core, site.wide):
            if directions is not None:
                cores.update(directions.basis.detach().cpu().contiguous().numpy().tobytes())
        for name in ("A", "B"):
            if not site.is_split(name):
                factors.update(site.factor(name).detach().cpu().contiguous().float().numpy().tobytes())
    return {"cores": cores.hexdigest(), "LoRA factors": factors.hexdigest()}
