"""What rho a projection leaves in lowered precision: methods for `anchorlora run`, to compare with the values in the paper.

    anchorlora run mini --method benchmarks/precision.py:sfor_tf32 --set threads=1 --out OUT

The paper prints rho of 5e-5 (sfor) and 2e-5 (o-lora-hard) where float64 leaves 1e-8. Each method here is one of the two with weight
residual projection as the paper writes it, step by step (`ProjectStep`), and its arithmetic emulated on a CPU:

    tf32       operands of both products rounded to 10 bits of mantissa, sums in float32: torch on a GPU with allow_tf32
    float32    the same without rounding
    bf16 core  V rounded to bfloat16 (and so no longer orthonormal), products in float32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora import ActiveConstraint, Anchor, Freeze, Method, PerTask, ProjectGradient, Retract, RoutingOverlap, Shared


def tf32(x: Tensor) -> Tensor:
    """The nearest numbers with 10 bits of mantissa."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def bf16(x: Tensor) -> Tensor:
    """The nearest bfloat16 numbers."""
    return x.bfloat16().float()


ARITHMETIC: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # of operands, and of the core
    "tf32": (tf32, lambda V: V),
    "float32": (lambda x: x, lambda V: V),
    "bf16 core": (lambda x: x, bf16),
}


@dataclass(frozen=True)
class LoweredStep:
    """A <- A_pre + dA - (dA V) V^T after each step, in lowered precision; it promises nothing."""

    arithmetic: str
    first_task = 2
    requires = ("core",)

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        return _Lowered(anchor, *ARITHMETIC[self.arithmetic])

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        return {}


class _Lowered(ActiveConstraint):
    def __init__(self, anchor: Anchor, operand: Callable[[Tensor], Tensor], stored: Callable[[Tensor], Tensor]) -> None:
        self.operand, self.layers = operand, [(layer, stored(layer.core.basis.float())) for layer in anchor.layers]

    def before_optimizer_step(self) -> None:
        self.before = [layer.rows("A").clone() for layer, _ in self.layers]

    def after_optimizer_step(self) -> None:
        for before, (layer, V) in zip(self.before, self.layers, strict=True):
            rows = layer.rows("A")
            moved, V = rows - before, self.operand(V)
            on = self.operand(moved) @ V
            rows.copy_(before + moved - self.operand(on) @ V.T)


def _sfor(arithmetic: str) -> Method:
    return Shared() + ProjectGradient("A") + Freeze("B") + LoweredStep(arithmetic)


def _hard(arithmetic: str) -> Method:
    return PerTask() + RoutingOverlap(0.5) + Retract("A") + ProjectGradient("A") + LoweredStep(arithmetic)


sfor_tf32, sfor_float32, sfor_bf16_core = _sfor("tf32"), _sfor("float32"), _sfor("bf16 core")
hard_tf32, hard_float32, hard_bf16_core = _hard("tf32"), _hard("float32"), _hard("bf16 core")
