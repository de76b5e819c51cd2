"""What hard constraints demand of a site before they start.  Precision is a contract, checked at the door."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from anchorlora.devices import float64_device, in_float64
from anchorlora.errors import InvalidType, InvalidValue, NotFinite

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor
    from anchorlora.constraints.base import ActiveConstraint
    from anchorlora.geometry import Subspace

FLOAT32 = 2.0**-23  # machine epsilon


def exact_factor(layer: AdaptedLayer, name: str) -> Tensor:
    """The live factor's rows in this process, refused unless they are stored in float32 or float64."""
    parameter = layer.rows(name)
    if str(parameter.dtype) not in ("torch.float32", "torch.float64"):
        raise InvalidType(
            f"exact protection needs float32 factors, but {name} at {layer.name} is {parameter.dtype}; "
            "load the adapter with autocast_adapter_dtype=True"
        )
    return parameter


def core_of(layer: AdaptedLayer) -> Subspace:
    """The site's core, in float64 and where its factor is computed with; refused where there is none or its width is another's."""
    import torch

    if layer.core is None:
        raise InvalidValue(f"nothing is protected at {layer.name}: it has no core; pass cores=rows.cores() to Anchor.of")
    A = layer.factor("A")
    if layer.core.d != A.shape[1]:
        raise InvalidValue(f"the core at {layer.name} has width {layer.core.d}, but its A reads {A.shape[1]} inputs")
    return layer.core.to(dtype=torch.float64, device=float64_device(A.device))


def refuse_unsound(anchor: Anchor, *, when: str) -> None:
    """What a task starts from and is measured on, as it is in memory now: finite factors, orthonormal cores and wide bases."""
    wrong = not_finite(anchor)
    if wrong:
        raise NotFinite(f"{wrong} {when}; go on from factors that are finite")
    seen: set[int] = set()  # layers of one store share their directions
    for layer in anchor.layers:
        for kind, directions in (("core", layer.core), ("wide basis", layer.wide)):
            if directions is None or id(directions) in seen:
                continue
            seen.add(id(directions))
            try:
                directions.check()
            except NotFinite:
                raise NotFinite(
                    f"the {kind} at {layer.name} holds NaN or infinite values {when}; "
                    "nothing can be protected with it: make it again"
                ) from None
            except ValueError as error:
                raise InvalidValue(f"the {kind} at {layer.name}: {error}") from None


def refuse_replaced(anchor: Anchor) -> None:
    """The factors of a scope must be those of the model that runs, or another parameter would train unprotected."""
    replaced = anchor.replaced()
    if replaced:
        raise InvalidValue(
            f"the factors of {replaced} in the model are not those of this scope; make the Anchor after all wrapping and loading"
        )


def refuse_moved(held: Sequence[ActiveConstraint]) -> None:
    """Promises are about the anchor: what already does not hold before the first step, no later step can mend."""
    found = next((sentence for h in held if (sentence := h.violation())), None)
    if found:
        raise_moved(found)


def raise_moved(found: str) -> NoReturn:
    raise InvalidValue(
        f"the factors have moved since their anchor was made: {found}; make the Anchor anew, from the model as it is"
    )


def not_finite(anchor: Anchor) -> str | None:
    """The first live factor that holds what is no number."""
    import torch

    for layer in anchor.layers:
        for name in ("A", "B"):
            if not bool(torch.isfinite(layer.rows(name)).all()):
                return f"factor {name} at {layer.name} holds NaN or infinite values"
    return None


def response_on_core(layer: AdaptedLayer, A: Tensor) -> str | None:
    """How far a routing factor (r, d_in) has moved on the site's core since the anchor; None where that cannot be told."""
    if layer.core is None or layer.is_split("A") or A.shape != layer.start_factor("A").shape:
        return None
    rows = in_float64(A.detach())
    found, bound = off_core(rows - in_float64(layer.start_factor("A")), core_of(layer), size=rows)
    return on_core("|dA V|", layer, found, bound)


def on_core(what: str, layer: AdaptedLayer, found: float, bound: float) -> str:
    """Both numbers of a promise about a core."""
    return f"{what} at {layer.name} is {found:.1e}, and rounding explains {bound:.1e} at most"


def off_core(rows: Tensor, core: Subspace, *, size: Tensor) -> tuple[float, float]:
    """(|rows V|, the largest that still counts as zero beside a factor of this size).  rows (n, d_in), float64.

    Zero: no more than 8 roundings of the factor to float32, or 1e-5 of the rows themselves. The ratio alone would be wrong, because
    a move that is itself as small as the rounding has a ratio of order one.
    """
    found = float(core.coordinates(rows).norm())
    return found, max(8 * FLOAT32 * float(size.norm()), 1e-5 * float(rows.norm()))


def true_precision(anchor: Anchor) -> AbstractContextManager[None]:
    """Arithmetic that the loop cannot lower, on the devices of a scope's factors, and without gradients."""
    from anchorlora.devices import true_precision

    return true_precision({layer.factor(name).device.type for layer in anchor.layers for name in ("A", "B")})


def processes() -> int:
    """How many processes train together; 1 where no process group was started."""
    from torch import distributed

    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def refuse_unlike_processes(anchor: Anchor) -> None:
    """Every process must hold the same cores and start, or they would drift apart without a word.  All processes must ask."""
    if processes() == 1:
        return
    from torch import distributed

    mine = _digests(anchor)
    everyone: list[dict[str, str] | None] = [None] * processes()
    distributed.all_gather_object(everyone, mine)
    for other in everyone:
        for what, digest in (other or {}).items():
            if mine.get(what, digest) != digest:
                raise InvalidValue(
                    f"{what} differ between processes; make cores once and load the same file everywhere, "
                    "and wrap the model (DDP, fully_shard) before protecting it"
                )


def _digests(anchor: Anchor) -> dict[str, str]:
    """A hash of each thing that all processes must share; factors that are split are each process's own."""
    cores, factors = hashlib.sha256(), hashlib.sha256()
    for layer in anchor.layers:
        for directions in (layer.core, layer.wide):
            if directions is not None:
                cores.update(directions.basis.detach().cpu().contiguous().numpy().tobytes())
        for name in ("A", "B"):
            if not layer.is_split(name):
                factors.update(layer.factor(name).detach().cpu().contiguous().float().numpy().tobytes())
    return {"cores": cores.hexdigest(), "LoRA factors": factors.hexdigest()}
