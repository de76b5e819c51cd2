"""Numbers that are not numbers, found before the optimizer would write them into the factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anchorlora.adapters import Scope
from anchorlora.constraints import Held
from anchorlora.errors import NotFinite


def gradient_norm(loss: float, parameters: Sequence[nn.Parameter], step: int) -> float:
    """The norm of the loss's gradient over all parameters.  Raises NotFinite unless it and the loss are numbers."""
    norms = torch.stack([p.grad.norm() for p in parameters if p.grad is not None])
    norm = float(norms.norm())
    for what, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise NotFinite(f"the {what} is {value} at step {step}")
    return norm


@contextmanager
def naming_the_step(step: int) -> Iterator[None]:
    """What is found within the block happened at this step."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{error} at step {step}") from None


@dataclass(frozen=True)
class FiniteGradients:
    """Constrains nothing; listed last it stops a step whose gradients other constraints have made NaN or infinite."""

    from_task = 1
    reads = ()

    def hold(self, scope: Scope) -> Held:
        return _Looking(scope)

    def remember(self, scope: Scope) -> dict[str, Tensor]:
        return {}


class _Looking(Held):
    def __init__(self, scope: Scope) -> None:
        self.gradients = {(site.layer, name): site.factor(name) for site in scope.sites for name in ("A", "B")}
        self.step = 0

    def begin(self, step: int) -> None:
        self.step = step

    def before_step(self) -> None:
        self.step += 1
        there = {place: p.grad for place, p in self.gradients.items() if p.grad is not None}
        if there and not math.isfinite(float(torch.stack([g.norm() for g in there.values()]).norm())):
            layer, name = next((place for place, g in there.items() if not bool(torch.isfinite(g).all())), next(iter(there)))
            raise NotFinite(
                f"the gradient of {name} at {layer}, as constraints have made it, is NaN or infinite at step {self.step}"
            )
