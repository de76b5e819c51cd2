"""Freeze a factor: dB = 0   (paper, eq. 11).  The ΔB term s dB A_0 V of a learned anchor vanishes.

From the first task on, `Freeze("A", first_task=1)` is LoRA-FA (Zhang et al. 2023, arXiv 2308.03303): A stays as it was drawn and B
trains. The paper freezes A to store fewer activations and has one task. In a sequence, a shared A alone protects nothing: B moves
what A reads of the core. In a fresh block whose start was retracted, A neither reads the core nor moves, so the response is exact.
PEFT's optimizer of that name also multiplies the gradient of B by (s^2 A A^T)^-1; here the optimizer is that of all methods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.devices import in_float64
from anchorlora.processes import wrapped

if TYPE_CHECKING:
    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class Freeze(ProtectsPast):
    """Freeze one factor bitwise, whether or not the optimizer has it: dB = 0   (paper, eq. 11).

    With `ProjectDisplacement("A")` it protects a learned anchor: the ΔB term s dB A_0 V vanishes. `protect` unfreezes the
    factor at its end.

    Args:
        factor: The factor to freeze, "A" or "B".
        first_task: The first task, counted from 1, on which it is frozen.

    Example:
        >>> from anchorlora import Anchor, Freeze, ProjectDisplacement, protect
        >>> model = tiny()
        >>> trained = [p for p in model.parameters() if p.requires_grad]
        >>> for p in trained:
        ...     p.data += 0.02 * torch.randn_like(p)  # as after an earlier task: a new adapter has B = 0
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> optimizer = torch.optim.AdamW(trained)
        >>> with protect(optimizer, anchor, [Freeze("B"), ProjectDisplacement("A")]):
        ...     for p in trained:
        ...         p.grad = torch.randn_like(p)  # loss.backward() in a real loop
        ...     optimizer.step()
        >>> layer = anchor.layers[0]
        >>> torch.equal(layer.factor("B"), layer.start_factor("B"))
        True
        >>> layer.factor("B").requires_grad  # given back
        True
    """

    factor: str = "B"
    first_task: int = field(default=2, kw_only=True)
    requires = ()

    @property
    def closes(self) -> tuple[str, ...]:
        """A that does not move, or B that does not."""
        return {"A": ("displacement",), "B": ("delta_b",)}.get(self.factor, ())

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Freeze the factor of every layer.

        Args:
            anchor: The task's anchor.
        """
        return Frozen(anchor, self.factor)


class Frozen(ActiveConstraint):
    """A factor that stays as it was at the start, whatever sets its flag or its gradient."""

    def __init__(self, anchor, factor):
        self.factor, self.layers = factor, anchor.layers
        self.hooks, self.held = [], []
        for layer in anchor.layers:
            parameter = layer.factor(factor)
            if wrapped() and parameter.requires_grad and not layer.is_split(factor):
                # DistributedDataParallel waits for the gradient of whatever trained when it was built: it gets zeros
                self.hooks.append(parameter.register_hook(lambda gradient: gradient.new_zeros(gradient.shape)))
            else:
                parameter.requires_grad_(False)
                self.held.append(parameter)

    def before_optimizer_step(self) -> None:
        for parameter in self.held:
            parameter.requires_grad_(False)  # whatever has set it again
        for layer in self.layers:
            layer.factor(self.factor).grad = None  # a stale one, or one made in spite of the flag, would let AdamW move it

    def after_optimizer_step(self) -> None:
        pass  # what something else has written to the factor is to be found

    def project(self) -> None:
        for layer in self.layers:  # after a failed step, and in the copies of an optimizer that trained the factor before
            layer.rows(self.factor).copy_(layer.start_rows(self.factor))

    def violation(self) -> str | None:
        for layer in self.layers:  # from the anchor's start, which a `Retract` listed later moves too
            moved = float((in_float64(layer.rows(self.factor)) - in_float64(layer.start_rows(self.factor))).norm())
            if moved != 0.0:  # also for NaN
                return f"the frozen factor {self.factor} at {layer.name} has moved by {moved:.1e}, and 0 is allowed"
        return None

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()
