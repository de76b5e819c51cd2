"""What hard constraints demand of a site before they start.  Precision is a contract, checked at the door."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Site
    from anchorlora.geometry import Subspace

FLOAT32 = 2.0**-23  # machine epsilon


def exact_factor(site: Site, name: str) -> Tensor:
    """The live factor's rows in this process, refused unless they are stored in float32 or float64."""
    parameter = site.rows(name)
    if str(parameter.dtype) not in ("torch.float32", "torch.float64"):
        raise TypeError(
            f"exact protection needs float32 factors, but {name} at {site.layer} is {parameter.dtype}; "
            "load the adapter with autocast_adapter_dtype=True"
        )
    return parameter


def core_of(site: Site) -> Subspace:
    """The site's core in float64 beside its factor, refused where there is none or its width is another's."""
    import torch

    if site.core is None:
        raise ValueError(f"nothing is protected at {site.layer}: it has no core; pass cores=rows.cores() to Scope.of")
    A = site.factor("A")
    if site.core.d != A.shape[1]:
        raise ValueError(f"the core at {site.layer} has width {site.core.d}, but its A reads {A.shape[1]} inputs")
    return site.core.to(dtype=torch.float64, device=A.device)


def off_core(rows: Tensor, core: Subspace, *, size: Tensor) -> tuple[float, float]:
    """(|rows V|, the largest that still counts as zero beside a factor of this size).  rows (n, d_in), float64.

    Zero: no more than 8 roundings of the factor to float32, or 1e-5 of the rows themselves. The ratio alone would be wrong, because
    a move that is itself as small as the rounding has a ratio of order one (INFRA R-H3).
    """
    found = float(core.coordinates(rows).norm())
    return found, max(8 * FLOAT32 * float(size.norm()), 1e-5 * float(rows.norm()))
