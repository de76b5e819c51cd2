"""Conditions that must hold before constraints act, and the tolerance of |dA V|.  Precision is a contract, checked at the door."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from anchorlora.devices import float64_device, in_float64, placed, torch
from anchorlora.errors import InvalidType, InvalidValue, NotFinite
from anchorlora.text import amount

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from anchorlora.adapters import AdaptedLayer, Anchor
    from anchorlora.devices import Uninterrupted
    from anchorlora.geometry import Subspace

FLOAT32 = 2.0**-23  # machine epsilon
NEGLIGIBLE = 1e-6  # of the norm of rows: a direction of them that is weaker is rounding


def exact_factor(layer: AdaptedLayer, name: str) -> Tensor:
    """Return the rows of a live factor that this process holds."""
    parameter = layer.rows(name)
    if str(parameter.dtype) not in ("torch.float32", "torch.float64"):
        raise InvalidType(
            f"exact protection needs float32 factors, but {name} at {layer.name} is {parameter.dtype}; "
            "load the adapter with autocast_adapter_dtype=True"
        )
    return parameter


def refuse_split(layer: AdaptedLayer, names: Sequence[str], why: str) -> None:
    """Refuse factors that are split over processes, with the reason."""
    for name in names:
        if layer.is_split(name):
            raise InvalidType(
                f"{name} at {layer.name} is split over processes, and {why}; "
                "keep LoRA factors whole (ignored_params of fully_shard)"
            )


def restart(layer: AdaptedLayer, rows: Tensor) -> None:
    """Write another start of A, which moves with it: `rows` (r, d_in)."""
    A = layer.rows("A")
    A.copy_(placed(rows, A.dtype, A.device))
    layer.start_rows("A").copy_(A)


def core_of(layer: AdaptedLayer, name: str | None = None) -> Subspace:
    """Return a layer's core in float64, on the device that its factors are computed with, for a factor: the first if None."""
    if layer.core is None:
        raise InvalidValue(f"nothing is protected at {layer.name}: it has no core; pass cores=store.cores() to Anchor.of")
    name = name or layer.names[0]
    reads = layer.rows(name)
    if layer.core.d != reads.shape[1]:
        raise InvalidValue(f"the core at {layer.name} has width {layer.core.d}, but its {name} reads {reads.shape[1]} inputs")
    return layer.core.to(dtype=torch.float64, device=float64_device(reads.device))


def refuse_unsound(anchor: Anchor, *, when: str) -> None:
    """Refuse factors that are not finite or that layers with unlike cores share, and bases that are not orthonormal."""
    if wrong := not_finite(anchor):
        raise NotFinite(f"{wrong} {when}; continue from finite factors")
    seen: set[int] = set()  # layers of one store share their directions
    first: dict[int, AdaptedLayer] = {}
    for layer in anchor.layers:
        other = first.setdefault(id(layer.factor(layer.names[0])), layer)
        core, shared = layer.core, other.core
        if core is not None and shared is not None and core is not shared and not torch.equal(core.basis, shared.basis):
            raise InvalidValue(
                f"{other.name} and {layer.name} share one {layer.names[0]}, and each has a core of its own; give both the "
                "directions of both (Subspace.joining)"
            )
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


def full_layers(anchor: Anchor) -> dict[str, int]:
    """Return the layers all of whose input directions are protected, with their number."""
    return {layer.name: layer.core.d for layer in anchor.layers if layer.core is not None and layer.core.k >= layer.core.d}


def refuse_full(anchor: Anchor) -> None:
    """Refuse layers all of whose input directions are protected: nothing can be learned there, and what moves is rounding."""
    for name, width in full_layers(anchor).items():
        raise InvalidValue(
            f"{name} is full: all {width} directions of its input are protected, so nothing can be learned there; "
            "protect fewer directions of each task (at_most), or take a method that protects fewer, such as fold-16"
        )


def refuse_nothing_free(anchor: Anchor, closed: Collection[str]) -> None:
    """Refuse cores that leave nothing to learn in, and warn of layers that are full, where A and the response both hold still."""
    if "displacement" not in closed or not {"start", "state", "delta_b"} & set(closed):
        return
    full = full_layers(anchor)
    if not full:
        return
    name, more = next(iter(full)), f" and {amount(len(full) - 1, 'more layer')}" if len(full) > 1 else ""
    if len(full) == len(anchor.layers):
        raise InvalidValue(
            f"every layer is full: all {full[name]} directions of the input of {name} are protected, so nothing can be learned; "
            "protect fewer directions (FeatureStore(limit=64))"
        )
    warnings.warn(f"nothing can be learned at {name}{more}: all directions of the input are protected", stacklevel=4)


def name_open(anchor: Anchor, closed: Collection[str], *, projects: bool) -> None:
    # a warning where constraints hold a part of the response on the core, or project the gradient of A or of a full weight, and
    # leave the rest of it open, with what closes it
    of_A, of_B = "displacement" in closed, bool({"delta_b", "delta_b_term", "start"} & set(closed))
    if (of_A and of_B) or not (of_A or of_B or projects) or {"response", "state"} & set(closed):
        return
    layers = [layer for layer in anchor.layers if layer.core is not None and anchor.model is not None]
    layers = [layer for layer in layers if projects or "A" in layer.names]
    with_B = [layer for layer in layers if "B" in layer.names]
    reading = [layer for layer in with_B if not of_B and layer.factor("B").requires_grad and reads_core(layer)]
    for layer in (reading or ([] if of_A else layers))[:1]:
        how, first = [] if not reading else ['Freeze("B")'] if layer.factor("B").any() else ['Retract("A")'], layer.names[0]
        how += [] if of_A else [f'ProjectDisplacement("{first}")']
        what = "B trains, and A reads protected directions" if of_A else f"{first} may move on protected directions"
        what += " and reads them while B trains," if reading and not of_A else ""
        warnings.warn(f"{what} at {layer.name}, so what the layer answers to them changes; add {' and '.join(how)}", stacklevel=3)


def refuse_learned(anchor: Anchor, part: str) -> None:
    """Refuse a start of A where that would change the function, or cannot be done."""
    for layer in anchor.layers:
        exact_factor(layer, "A")
        refuse_split(layer, ("A",), "its rows cannot be started one process at a time")
        if bool(layer.factor("B").any()):
            raise InvalidValue(f"{part} would change the function at {layer.name}: B is not zero there; start a new block with it")


def refuse_replaced(anchor: Anchor) -> None:
    """Refuse an anchor whose factors are not those of the model: other parameters would train unprotected."""
    if replaced := anchor.replaced():
        raise InvalidValue(
            f"the factors of {replaced} in the model are not those of this anchor; make the Anchor after all wrapping and loading"
        )


def refuse_stuck(optimizer: Optimizer, anchor: Anchor, frozen: Collection[str]) -> None:
    """Refuse a frozen factor whose companion does not train, or that is zero at every layer, so that the gradient of the other one
    is zero: nothing can train.
    """
    moves = any(group.get("initial_lr", group.get("lr", 1)) for group in optimizer.param_groups)  # some have no rate
    if not anchor.layers or any(layer.gated for layer in anchor.layers) or not moves:
        return
    others = [layer.factor(name) for layer in anchor.layers for name in layer.names if name not in frozen]
    if frozen and others and not any(parameter.requires_grad for parameter in others):
        names = " and ".join(f'Freeze("{name}")' for name in frozen)
        raise InvalidValue(
            f"nothing can train: {names} holds one factor, and the other does not train, as in LoRA-FA; let it train"
        )
    for name in frozen:
        if not any(bool(getattr(layer.current.whole(), name).any()) for layer in anchor.layers):
            how = 'use Retract("A") and ProjectDisplacement("A") for a new adapter' if name == "B" else "leave Freeze out"
            raise InvalidValue(f'{name} is zero at every layer and Freeze("{name}") keeps it so: no update can leave zero; {how}')


def refuse_moved(active: Iterable[Any]) -> None:
    """Refuse to start from factors that violate a constraint already: no later step can mend that."""
    if violation := next((sentence for c in active if (sentence := c.violation())), None):
        raise InvalidValue(
            f"the factors have moved since their anchor was made: {violation}; make the Anchor anew, from the model as it is"
        )


def not_finite(anchor: Anchor) -> str | None:
    """Return a sentence about the first live factor that holds NaN or infinite values, or None."""
    for layer in anchor.layers:
        for name in layer.names:
            if not bool(torch.isfinite(layer.rows(name)).all()):
                return f"factor {name} at {layer.name} holds NaN or infinite values"
    return None


def response_on_core(layer: AdaptedLayer, A: Tensor) -> str | None:
    """Return a sentence if a factor A has moved on the layer's core since the start; None if not, or where that cannot be told."""
    if layer.core is None or layer.is_split("A") or A.shape != layer.start_factor("A").shape:
        return None
    rows = in_float64(A.detach())
    moved, bound = off_core(rows - in_float64(layer.start_factor("A")), core_of(layer), size=rows)
    return on_core("|dA V|", layer, moved, bound)


def reads_core(layer: AdaptedLayer, name: str = "A") -> bool:
    """Return True if a factor answers to directions of its core by more than rounding explains."""
    rows = layer.rows(name).detach()
    read, bound = off_core(in_float64(rows), core_of(layer, name), size=rows)
    return not read <= bound


def on_core(what: str, layer: AdaptedLayer, value: float, bound: float) -> str:
    """Return the sentence for a violated condition on a core."""
    return f"{what} at {layer.name} is {value:.1e}, and rounding explains {bound:.1e} at most"


def off_core(rows: Tensor, core: Subspace, *, size: Tensor) -> tuple[float, float]:
    """Return |rows V| and the numerical tolerance for it: `rows` (n, d_in).

    The tolerance is 8 roundings of the factor to float32, or 1e-5 of the rows themselves if that is larger. The ratio alone would
    be wrong, because a displacement as small as the rounding has a ratio of order one.
    """
    norm = float(core.coordinates(rows).norm())
    return norm, max(8 * FLOAT32 * float(size.norm()), 1e-5 * float(rows.norm()))


def true_precision(anchor: Anchor) -> AbstractContextManager[Uninterrupted]:
    """Return a context of full-precision arithmetic without gradients, on the devices of the factors, that a loop cannot lower."""
    from anchorlora.devices import true_precision

    devices = {layer.factor(name).device.type for layer in anchor.layers for name in layer.names}
    return true_precision(devices)


def processes() -> int:
    """Return how many processes train together; 1 without a process group."""
    return torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1


def refuse_unlike_processes(anchor: Anchor) -> None:
    """Refuse cores and starts that differ between processes, which would drift apart silently. All processes must call it."""
    if processes() == 1:
        return
    digests = _digests(anchor)
    everyone: list[dict[str, str] | None] = [None] * processes()
    torch.distributed.all_gather_object(everyone, digests)
    for other in everyone:
        for what, digest in (other or {}).items():
            if digests.get(what, digest) != digest:
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
                held = directions.basis if directions.tokens is None else directions.tokens
                cores.update(held.detach().cpu().contiguous().numpy().tobytes())
        for name in layer.names:
            if not layer.is_split(name):
                factors.update(layer.factor(name).detach().cpu().contiguous().float().numpy().tobytes())
    return {"cores": cores.hexdigest(), "LoRA factors": factors.hexdigest()}
