"""Several processes that train one model: they must start from the same factors and protect the same directions."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anchorlora.adapters import Scope


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
