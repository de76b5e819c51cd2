"""Weight residual projection, anchored: A <- A_0 + (A_raw - A_0) P   (paper, eq. 12, summed over the steps of a task).

    A_0  (r, d_in)  start      A_raw  after the optimizer's step      V  (d_in, k)  core      P = I - V V^T, never formed

`ProjectStep` is the paper's step-by-step form, A <- A_pre + (A_raw - A_pre) P. Both are equal in exact arithmetic. Step by step,
every write rounds again and the roundings accumulate like a random walk. From the anchor there is one rounding in all, and a
displacement from any other source is repaired. Arithmetic is in float64, storage in the parameter's own precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor, off_core, on_core, refuse_moved
from anchorlora.constraints.stacks import outside, stacked_cores
from anchorlora.devices import in_float64

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class ProjectDisplacement(ProtectsPast):
    """Project the displacement from the task's start after every step, so that (A - A_0) V = 0 under any optimizer.

        A <- A_0 + (A_raw - A_0) P                (paper, eq. 12, summed over the steps of a task)

    List it last among the constraints that write to A, so that its rounding is the last.

    Args:
        factor: The factor to project, "A".

    Example:
        >>> from anchorlora import Anchor, ProjectDisplacement, Retract, protect
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW(trained)
        >>> with protect(optimizer, anchor, [Retract("A"), ProjectDisplacement("A")]):
        ...     for p in trained:
        ...         p.grad = torch.randn_like(p)  # loss.backward() in a real loop
        ...     optimizer.step()
        >>> layer = anchor.layers[0]
        >>> moved = layer.factor("A") - layer.start_factor("A")
        >>> bool((moved @ layer.core.basis).norm() < 1e-6 < moved.norm())
        True
    """

    factor: str = "A"

    @property
    def closes(self) -> tuple[str, ...]:
        """A that does not move on the core."""
        return ("displacement",) if self.factor == "A" else ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to project onto the complement of each layer's core.

        Args:
            anchor: The task's anchor, with cores.

        Raises:
            InvalidType: The factor is not stored in float32 or float64.
            InvalidValue: A layer has no core, or one of another width.
        """
        return _FromAnchor(anchor, self.factor)


class _FromAnchor(ActiveConstraint):
    what = ""  # of the displacement, in the sentence on a violation

    def __init__(self, anchor, factor):
        for layer in anchor.layers:
            exact_factor(layer, factor)
        self.factor, self.targets = factor, [(layer, core_of(layer, factor)) for layer in anchor.layers]
        self.stacks = stacked_cores(anchor, factor)

    def project(self) -> None:
        for stack, V in self.stacks:
            start = self.start(stack)
            moved = in_float64(stack.of(lambda layer: layer.rows(self.factor))) - start
            stack.write(self.factor, start + outside(moved, V))
        for layer, core in self.targets:
            if core.tokens is not None:  # rows of an embedding are put back bitwise, without a copy of the whole
                layer.rows(self.factor)[:, core.tokens] = layer.start_rows(self.factor)[:, core.tokens]

    def origin(self, layer) -> Tensor:
        return in_float64(layer.start_rows(self.factor))

    def start(self, stack) -> Tensor:
        """The origins of a stack, which stay: the first step comes after every `Retract`, which may move the start."""
        return stack.once("start", lambda: stack.of(self.origin))

    def violation(self) -> str | None:
        for layer, core in self.targets:
            rows = layer.rows(self.factor)
            if core.tokens is not None:
                start = layer.start_rows(self.factor)
                moved, bound = float((rows[:, core.tokens] - start[:, core.tokens]).norm()), 0.0
            else:
                moved, bound = off_core(in_float64(rows) - self.origin(layer), core, size=in_float64(rows))
            if not moved <= bound:
                return on_core(f"|d{self.factor} V|{self.what}", layer, moved, bound)
        return None


@dataclass(frozen=True)
class ProjectStep(ProtectsPast):
    """Project each step by itself, so that (A_q+1 - A_q) V = 0: the paper's form, kept to compare.

        A <- A_pre + (A_raw - A_pre) P            (paper, eq. 12)

    Roundings accumulate over the steps of a task; `ProjectDisplacement` has one rounding in all.

    Args:
        factor: The factor to project, "A".

    Example:
        >>> from anchorlora import Anchor, ProjectStep, Retract, protect
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW(trained)
        >>> with protect(optimizer, anchor, [Retract("A"), ProjectStep("A")]):
        ...     for p in trained:
        ...         p.grad = torch.randn_like(p)  # loss.backward() in a real loop
        ...     optimizer.step()
        >>> layer = anchor.layers[0]
        >>> moved = layer.factor("A") - layer.start_factor("A")
        >>> bool((moved @ layer.core.basis).norm() < 1e-6 < moved.norm())
        True
    """

    factor: str = "A"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to project each step onto the complement of each layer's core.

        Args:
            anchor: The task's anchor, with cores.

        Raises:
            InvalidType: The factor is not stored in float32 or float64.
            InvalidValue: A layer has no core, or A has already moved on it since the anchor was made.
        """
        refuse_moved([_FromAnchor(anchor, self.factor)])  # a displacement at the start would stay for good
        return _FromStep(anchor, self.factor)


class _FromStep(_FromAnchor):
    what = " of a step"

    def __init__(self, anchor, factor):
        super().__init__(anchor, factor)
        self.before = {layer.name: in_float64(layer.rows(factor).detach()).clone() for layer in anchor.layers}

    def before_optimizer_step(self) -> None:
        for layer, _ in self.targets:
            self.before[layer.name].copy_(in_float64(layer.rows(self.factor)))

    def origin(self, layer) -> Tensor:
        return self.before[layer.name]

    def start(self, stack) -> Tensor:
        return stack.of(self.origin)
