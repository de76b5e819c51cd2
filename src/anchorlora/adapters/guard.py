"""Guard of an adapted layer: everything it computes with, besides the protected factors, must stay as it was.

    y = base(x) + sum_j s_j B_j A_j x        j  active adapters; the factors of one of them are protected

A layer is known by its parts (which adapters are active, how they are scaled, which tensors it holds and whether they were written
to) and by its function: with the protected adapter's scale at zero it must answer a few rows as it did at the anchor, and the
difference that the scale makes must be s B A x. Any change that matters changes the function, including those nobody foresaw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from anchorlora.adapters.kinds import active_at, block_factors, hold
from anchorlora.adapters.sharding import is_sharded, local
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidType, InvalidValue
from anchorlora.geometry import Subspace

SEED = 20_260_101  # of the rows that a layer is tested on; any number will do
SUMMED_AT_ONCE = 2**22
NOT_LINEAR = ("ParamWrapper", "MultiheadAttention", "Conv1d", "Conv2d", "Conv3d")  # PEFT classes of more than one matrix


@dataclass(frozen=True)
class Snapshot:
    """Snapshot of one tensor of a layer: the same as long as nobody replaces it or writes to it."""

    tensor: Tensor
    place: int
    version: int  # torch's count of in-place writes
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Snapshot:
        """Take a snapshot."""
        return cls(tensor, 0 if is_sharded(tensor) else tensor.data_ptr(), tensor._version, tensor.device)

    def same(self, tensor: Tensor | None) -> bool:
        """Return True if the tensor is the one of the snapshot and was not written to."""
        return tensor is self.tensor and tensor.data_ptr() == self.place and tensor._version == self.version

    def moved(self, tensor: Tensor | None) -> bool:
        """Return True if the tensor was moved to another device, and not written to."""
        return tensor is self.tensor and tensor.device != self.device and tensor._version == self.version


@dataclass(frozen=True)
class Sums:
    """Snapshot of a tensor outside the protected layers, which others may store anew, move or cast as long as its values stay."""

    taken: Snapshot  # the tensor, its place and its version
    values: tuple[float, float]  # sums of its values and of their squares, in float64
    quick: str  # its sum, since fused optimizers and BatchNorm write without torch's count

    @classmethod
    def of(cls, tensor: Tensor) -> Sums:
        """Take a snapshot."""
        return cls(Snapshot.of(tensor), _sums(local(tensor)), _quick_sum(local(tensor)))

    def same(self, tensor: Tensor) -> bool:
        """Return True unless the values have changed."""
        if is_sharded(self.taken.tensor):  # FSDP2 shows the whole tensor for a while, but an optimizer moves this process's rows
            tensor = local(self.taken.tensor)
        elif tensor.device.type == "meta" or is_sharded(tensor):
            return True  # one that was whole then and is split now is summed by all processes alone, and one may ask
        elif self.taken.same(tensor) and _quick_sum(tensor) == self.quick:
            return True
        size = math.sqrt(self.values[1] * max(1, tensor.numel())) + self.values[1]
        return all(abs(now - old) <= 1e-12 * size for now, old in zip(_sums(tensor), self.values, strict=True))


def _quick_sum(tensor: Tensor) -> str:
    """The sum as text, in which NaN equals itself."""
    return str(float(tensor.detach().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))))


def _sums(tensor: Tensor) -> tuple[float, float]:
    total = square = 0.0
    for some in tensor.detach().reshape(-1).split(SUMMED_AT_ONCE):
        values = in_float64(some)
        total, square = total + float(values.sum()), square + float(values @ values)
    return total, square


def idle_tensors(model: nn.Module) -> set[int]:
    """Return the identities of the factors of all adapters that the model does not compute with now."""
    return {
        id(tensor)
        for module in model.modules()
        if isinstance(module, LoraLayer)
        for name, tensor in module.named_parameters()
        if name.startswith("lora_") and name.split(".")[1] not in active_at(module)
    }


@dataclass(frozen=True, eq=False)
class WholeLayer:
    """One adapted layer as it was at the anchor, except for the factors of `adapter`."""

    layer: str
    module: LoraLayer
    adapter: str  # adapter whose factors are protected
    base: nn.Module
    scales: dict[str, float]  # scale of every active adapter
    parts: dict[str, Snapshot]
    rows: tuple[Tensor, ...]
    answers: tuple[Tensor, ...]
    split: bool = False  # whether the base weights are split over processes: they come and go

    @classmethod
    def of(
        cls, layer: str, module: LoraLayer, adapter: str, *, core: Subspace | None, gated: bool, split: bool = False
    ) -> WholeLayer:
        """Take a snapshot of the layer as it is now. Call this and `changed` inside `true_precision`."""
        parts = {name: Snapshot.of(t) for name, t in _others(module, adapter, whole=not split)}
        rows, answers = [], []
        for some in () if split or gated else _rows(module, adapter, core):
            try:
                (answer,) = _answers(module, adapter, some, 0.0)
            except (RuntimeError, TypeError, ValueError, AttributeError):  # it needs other inputs too: only its parts are known
                continue
            rows.append(some)
            answers.append(answer)
        scales = {name: float(module.scaling[name]) for name in active_at(module)}
        return cls(layer, module, adapter, module.get_base_layer(), scales, parts, tuple(rows), tuple(answers), split)

    def trains(self) -> str | None:
        """Return the name of the first tensor of the layer that trains besides the protected factors, or None."""
        return next((name for name, tensor in _others(self.module, self.adapter) if tensor.requires_grad), None)

    def hold(self) -> Callable[[], None]:
        """Let code that switches adapters switch only the protected one; return the function that ends it."""
        return hold(self.module, self.adapter)

    def changed(self, module: nn.Module | None) -> str | None:
        """Return one sentence on what has changed since the snapshot, or None if nothing has."""
        where = f"at {self.layer}"
        if not isinstance(module, LoraLayer) or module is not self.module or module.get_base_layer() is not self.base:
            return f"the layer {where} was replaced by another"
        if module.disable_adapters or module.merged:
            return f"the adapters {where} are {'merged' if module.merged else 'switched off'}"
        if (kind := _variant(module)) is not None:
            return f"an adapter {where} has become a {kind}"
        active = active_at(module)
        if added := [name for name in active if name not in self.scales]:
            return f"the adapter {added[0]!r} became active {where}"
        if gone := [name for name in self.scales if name not in active]:
            return f"the adapter {gone[0]!r} is no longer active {where}"
        for name, scale in self.scales.items():
            if float(module.scaling[name]) != scale:
                return f"the scale of the adapter {name!r} {where} was {scale:g} and is {float(module.scaling[name]):g} now"
        now = dict(_others(module, self.adapter))
        if training := [name for name, tensor in now.items() if tensor.requires_grad]:
            return f"{training[0]} {where} trains now"
        return self._function_changed(dict(_others(self.module, self.adapter, whole=not self.split)))

    def _function_changed(self, now: dict[str, Tensor]) -> str | None:
        same = {name for name, part in self.parts.items() if part.same(now.get(name)) or part.moved(now.get(name))}
        written = next((name for name in {**self.parts, **now} if name not in same), None)
        if not self.rows:
            return f"{written} at {self.layer} was written to or replaced" if written else None
        sentences = (self._answers_changed(x, y, written) for x, y in zip(self.rows, self.answers, strict=True))
        return next(filter(None, sentences), None)

    def _answers_changed(self, rows: Tensor, answers: Tensor, written: str | None) -> str | None:
        rows = _as_read(self.module, self.adapter, rows)  # the model may have been cast or moved since
        answers = answers.to(rows.device)
        rest, whole = _answers(self.module, self.adapter, rows, 0.0, self.scales[self.adapter])
        if rest.dtype == answers.dtype and torch.equal(rest, answers):  # a library may store the same weight anew
            return self._other_than_product(rows, whole, rest)
        off = _norm(in_float64(rest) - in_float64(answers))
        if written:  # merging and unmerging rounds the weight anew; more than that is a change, even below the outputs' precision
            if not off <= _rounding(rows, answers, torch.float32) + self._of_product(rows, torch.float32):
                return f"{written} at {self.layer} was written to or replaced"
        elif not off <= (allowed := _rounding(rows, answers)):
            return (
                f"{self.layer} computes something else than at the anchor, apart from the protected factors: its outputs moved by "
                f"{off:.1e}, and rounding explains {allowed:.1e}"
            )
        return self._other_than_product(rows, whole, rest)

    def _other_than_product(self, rows: Tensor, whole: Tensor, rest: Tensor) -> str | None:
        factors, s = block_factors(self.module, self.adapter), self.scales[self.adapter]
        A, B = factors.A, factors.B
        off = _norm(in_float64(whole) - in_float64(rest) - in_float64(s * (rows.to(A) @ A.T) @ B.T))
        allowed = _rounding(rows, whole) + self._of_product(rows, A.dtype)
        if not off <= allowed:
            return (
                f"the output of the adapter {self.adapter!r} at {self.layer} is not s B A x: off by {off:.1e}, and "
                f"rounding explains {allowed:.1e}"
            )
        return None

    def _of_product(self, rows: Tensor, dtype: torch.dtype) -> float:
        """Largest norm that rounding of s B A x explains."""
        factors, s = block_factors(self.module, self.adapter), self.scales[self.adapter]
        return 8 * torch.finfo(dtype).eps * abs(s) * _norm(factors.A) * _norm(factors.B) * _norm(rows)


def active_adapters(layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of all adapters that any of the layers computes with, in PEFT's order."""
    return list(dict.fromkeys(name for module in layers.values() for name in active_at(module)))


def refuse_not_linear(layer: str, module: nn.Module) -> None:
    """Raise if PEFT's update of a layer acts on more than one matrix."""
    kind = type(module).__name__
    if kind not in NOT_LINEAR:
        return
    parameter = getattr(module, "parameter_name", None)
    where, option = (f"{layer} (its parameter {parameter})", "target_parameters and the") if parameter else (layer, "the")
    raise InvalidType(
        f"{where} is adapted through PEFT's {kind}, whose update is not a product on one matrix; leave it out of {option} targets"
    )


def refuse_unprotectable(layer: str, module: nn.Module, adapter: str) -> None:
    """Raise unless an adapter adds a product s B A to a layer."""
    active = active_at(module)
    if adapter not in active:
        raise InvalidValue(
            f"the adapter {adapter!r} is not active at {layer} (active: {', '.join(active) or 'none'}); activate it with "
            "set_adapter first, or give the one that trains"
        )
    if not isinstance(module, LoraLayer):  # its kind promises the rest
        return
    if module.merged:
        raise InvalidValue(f"the adapters at {layer} are merged into its weight; call unmerge_adapter() first")
    if module.use_dora.get(adapter):
        raise InvalidType(f"{layer} uses DoRA, whose update is not a product s B A; train a plain LoRA adapter instead")
    if (variant := _variant(module)) is not None:
        raise InvalidType(f"{layer} uses PEFT's {variant}, whose update is not a product s B A; train a plain LoRA adapter instead")
    A, B = module.lora_A[adapter], module.lora_B[adapter]
    if not (isinstance(A, nn.Linear) and isinstance(B, nn.Linear)):
        raise InvalidType(f"{layer} is not a linear layer, so its update is not a product s B A; leave it out of the targets")
    if A.in_features != module.in_features:
        raise InvalidType(
            f"{layer} reads {module.in_features} inputs and its A {A.in_features}, so its update is not a product s B A"
        )


def _variant(module: LoraLayer) -> str | None:
    kinds = {name: kind for name, kind in getattr(module, "lora_variant", {}).items() if name in active_at(module)}
    return next((type(kind).__name__ for kind in kinds.values()), None)


def _others(module: LoraLayer, adapter: str, *, whole: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the layer computes with, except the protected factors and those of inactive adapters. Unless the model is
    whole, only adapters that no process splits: weights of the base layer come and go.
    """
    active = active_at(module)
    factors = {id(module.lora_A[adapter].weight), id(module.lora_B[adapter].weight)}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        kind, _, rest = name.partition(".")
        idle = kind.startswith("lora_") and rest.partition(".")[0] not in active
        comes_and_goes = not whole and (not kind.startswith("lora_") or is_sharded(tensor))
        if id(tensor) not in factors and not idle and not comes_and_goes:
            yield name, tensor


def _rows(module: LoraLayer, adapter: str, core: Subspace | None) -> tuple[Tensor, Tensor]:
    """Test rows (n, d_in), a random one and one inside the core, with entries of size about 1, and two texts of three of them."""
    A = module.lora_A[adapter].weight
    draw = torch.Generator().manual_seed(SEED)
    rows = torch.randn(1, A.shape[1], generator=draw, dtype=torch.float32, device="cpu")
    if core is not None and core.k:
        inside = torch.randn(1, core.k, generator=draw, dtype=torch.float32, device="cpu") @ core.basis.detach().cpu().float().T
        rows = torch.cat([rows, inside * math.sqrt(core.d / core.k)])
    texts = torch.randn(2, 3, A.shape[1], generator=draw, dtype=torch.float32, device="cpu")
    texts[:, : len(rows)] = rows
    return _as_read(module, adapter, rows), _as_read(module, adapter, texts)


def _as_read(module: LoraLayer, adapter: str, rows: Tensor) -> Tensor:
    """The rows on the layer's device, in the type that the layer reads."""
    device, weight = module.lora_A[adapter].weight.device, getattr(module.get_base_layer(), "weight", None)
    if weight is None or not weight.is_floating_point() or weight.dtype.itemsize == 1:  # quantized: it takes any type
        return rows.to(device)
    return rows.to(device, weight.dtype)


def _answers(module: LoraLayer, adapter: str, rows: Tensor, *scales: float) -> list[Tensor]:
    """The layer's own forward at each scale of the adapter, without dropout and without the hooks of others."""
    base, scaling = module.get_base_layer(), module.scaling
    outputs: list[Tensor] = []
    with ExitStack() as until_the_end:
        until_the_end.callback(scaling.__setitem__, adapter, scaling[adapter])
        for part in (base, *module.lora_dropout.modules()):
            until_the_end.callback(setattr, part, "training", part.training)
            part.training = part is base  # in eval mode, bitsandbytes rounds 8-bit layers differently and packs 4-bit ones
        for scale in scales:
            scaling[adapter] = scale
            outputs.append(module.forward(rows))
    return outputs


def _rounding(rows: Tensor, answers: Tensor, stored: torch.dtype | None = None) -> float:
    """Largest norm by which outputs may differ when sums run in another order and are rounded to the layer's precision."""
    eps = max(torch.finfo(torch.float32).eps * math.sqrt(rows.shape[-1]), torch.finfo(stored or answers.dtype).eps)
    return 8 * eps * _norm(answers)


def _norm(x: Tensor) -> float:
    return float(in_float64(x.detach()).norm())
