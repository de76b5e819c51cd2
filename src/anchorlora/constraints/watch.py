"""The promises of all constraints, looked at on the live parameters: after the second step, then now and then, and at the end.

After the second step because a fresh block has B = 0, so that A gets no gradient in the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import Held
from anchorlora.constraints.optimizers import moved_by
from anchorlora.errors import ProtectionLost

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from anchorlora.adapters import Scope

CHECK_EVERY = 100  # optimizer steps between two looks at the live parameters


class Watch:
    """Counts the steps of a protected task and stops it where a promise no longer holds."""

    def __init__(
        self, optimizer: Optimizer, scope: Scope, held: Sequence[Held], hooks: Sequence[Any], *, every: int, step: int
    ) -> None:
        self.optimizer, self.scope, self.held, self.hooks, self.every = optimizer, scope, held, hooks, every
        self.trained = [(site.layer, p) for site in scope.sites for p in (site.factor("A"), site.factor("B")) if p.requires_grad]
        self.step, self.first = step, step

    def stepped(self) -> None:
        """One more step was made and projected."""
        self.step += 1
        if self.step == self.first + 2 or self.step % self.every == 0:
            self.look()

    def close(self) -> None:
        """The protected block has ended by itself."""
        self.look()

    def look(self) -> None:
        """Raises ProtectionLost with the step, what was found and the likely cause."""
        lost = self._detached() or self._broken()
        if lost:
            raise ProtectionLost(f"protection was lost by step {self.step}: {lost}")

    def _detached(self) -> str | None:
        """What the loop took away from under the constraints."""
        if any(hook.id not in (hook.hooks_dict_ref() or {}) for hook in self.hooks):
            return "the optimizer's step hooks were taken off; leave them until the protected block ends"
        moved = moved_by(self.optimizer)
        gone = next((layer for layer, parameter in self.trained if id(parameter) not in moved), None)
        if gone:
            return f"the optimizer no longer holds the factors of {gone}; protect again after the loop has replaced them"
        replaced = self.scope.replaced()
        if replaced:
            return f"the factors of {replaced} in the model are other parameters now; wrap and load the model before protecting it"
        return None

    def _broken(self) -> str | None:
        import torch

        with torch.no_grad():
            found = next((sentence for h in self.held if (sentence := h.broken())), None)
        if found is None:
            return None
        seen = (
            "no step of the protected optimizer was seen"
            if self.step == self.first
            else "it was written outside the optimizer's steps"
        )
        return f"{found}; {seen}, so another optimizer or program moves it"
