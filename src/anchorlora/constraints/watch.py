"""Verify all constraints on the live parameters: after the second step, then every `check_every` steps, and at the end.

After the second step because a new block has B = 0, so A gets no gradient in the first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import ActiveConstraint
from anchorlora.constraints.checks import not_finite, response_on_core, true_precision
from anchorlora.constraints.optimizers import declared, moved_by, unprotected
from anchorlora.errors import InvalidValue, NotFinite, ProtectionLost

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from anchorlora.adapters import Anchor

CHECK_EVERY = 100  # optimizer steps between two verifications on the live parameters
UNSEEN = "no step of the protected optimizer was seen"
STORED = {  # what must stay of a factor, as it was and as it is
    "device": "on {} and is on {} now; move the model first, then protect it",
    "dtype": "{} and is {} now; use autocast instead",
}


class StepWatch:
    """Counts the steps of a protected task and stops it when a constraint no longer holds."""

    def __init__(
        self,
        optimizer: Optimizer,
        anchor: Anchor,
        active: Sequence[ActiveConstraint],
        hooks: Sequence[Any],
        *,
        every: int,
        step: int,
        also_training: Collection[str] = (),
    ) -> None:
        if every < 1:
            raise InvalidValue(f"check_every is {every}; give the number of optimizer steps between two verifications, at least 1")
        self.optimizer, self.anchor, self.active, self.hooks, self.every = optimizer, anchor, active, hooks, every
        factors = [(layer.name, name, layer.factor(name)) for layer in anchor.layers for name in layer.names]
        self.trained = [(path, p) for path, _, p in factors if p.requires_grad]
        self.stored = [(path, name, p, {how: getattr(p, how) for how in STORED}) for path, name, p in factors]
        self.step, self.first, self.also_training = step, step, also_training
        self.instead: str | None = None  # another optimizer of the factors, which stepped before the first step of this one

    def count_step(self) -> None:
        """Count a step that was made and projected, and verify if it is time."""
        self.step += 1
        if self.step == self.first + 2 or self.step % self.every == 0:
            self.look()

    def before_optimizer_step(self) -> None:
        """Refuse factors in another precision or place: an optimizer or a projection would fail. Costs next to nothing."""
        if self._stored_otherwise():
            self.refuse_detached(self.step)

    def look(self, step: int | None = None) -> None:
        """Verify everything now."""
        step = self.step if step is None else step
        with true_precision(self.anchor):
            if wrong := not_finite(self.anchor):
                raise NotFinite(f"{wrong} by step {step}; something other than the optimizer wrote it, or a step overflowed")
            self.refuse_detached(step)
            violation = self._first_violation()
        if violation:
            raise _protection_lost(step, violation, f"{self._outside()}, so another optimizer or program moves it")
        if self.instead and self.step == self.first:  # as penalties, which leave nothing to verify, would not say
            raise _protection_lost(step, f"{UNSEEN}, but {self.instead} moved the factors: give that one to protect")

    def look_after(self, other: Optimizer) -> None:
        # Verify the constraints after a step of another optimizer that holds factors.
        if self.step == self.first:
            self.instead = type(other).__name__
        with true_precision(self.anchor):
            violation = self._first_violation()
        if violation:
            cause = f"{self._outside()}, so another optimizer, {type(other).__name__}, moves it: give that one to protect"
            raise _protection_lost(self.step, violation, cause)

    def _outside(self) -> str:
        return UNSEEN if self.step == self.first else "it was written outside the optimizer's steps"

    def refuse_detached(self, step: int) -> None:
        """Refuse to go on when the loop has removed what the constraints act on."""
        with true_precision(self.anchor):
            detached = self._describe_detached()
        if detached:
            raise _protection_lost(step, *detached)

    def _describe_detached(self) -> tuple[str, str | None] | None:
        """Return a sentence on the hooks that were removed, and one on the constraint that no longer holds."""
        if elsewhere := self._stored_otherwise("device"):
            return elsewhere, None
        if self.has_lost_hooks():
            return "the optimizer's step hooks were removed; leave them until the protected block ends", self._first_violation()
        if recast := self._stored_otherwise("dtype"):
            return recast, self._first_violation()
        moved = moved_by(self.optimizer)
        if gone := next((layer for layer, parameter in self.trained if id(parameter) not in moved), None):
            cause = f"the optimizer no longer holds the factors of {gone}; protect again after the loop has replaced them"
            return cause, self._first_violation() or self._live(gone)
        if replaced := self.anchor.replaced():
            cause = f"the factors of {replaced} in the model are other parameters now; wrap and load the model before protecting it"
            return cause, self._first_violation() or self._live(replaced)
        if changed := self.anchor.changed():
            return f"{changed[0]}; leave the layer as it was at the anchor until the protected block ends", self._first_violation()
        if beside := [name for name in self.anchor.changed_beside() if not declared(name, self.also_training)]:
            return (
                f"{beside[0]} has changed outside the protected layers, and nothing keeps what it was; freeze it, or name its "
                "module in also_training"
            ), self._first_violation()
        if joined := unprotected(self.optimizer, self.anchor, self.also_training):
            return f"{joined[0]} trains without protection now; freeze it, or name its module in also_training", None
        return None

    def has_lost_hooks(self) -> bool:
        """Return True if a hook on the optimizer was removed."""
        return any(hook.id not in (hook.hooks_dict_ref() or {}) for hook in self.hooks)

    def _first_violation(self) -> str | None:
        """The first constraint that does not hold, with its layer and both numbers."""
        return next((sentence for c in self.active if (sentence := c.violation())), None)

    def _live(self, path: str) -> str | None:
        """How the factor that is now in the model has moved on the core, if it is no longer the protected one."""
        layer = next(layer for layer in self.anchor.layers if layer.name == path)
        live = self.anchor.live().get(path)
        return response_on_core(layer, live.A) if live is not None else None

    def _stored_otherwise(self, *hows: str) -> str | None:
        """The first factor on another device, or in another precision, than when the task began."""
        for how in hows or STORED:
            for layer, name, parameter, before in self.stored:
                if (now := getattr(parameter, how)) != before[how]:
                    return f"factor {name} at {layer} was {STORED[how].format(before[how], now)}"
        return None


def _protection_lost(step: int, *parts: str | None) -> ProtectionLost:
    return ProtectionLost(f"protection was lost by step {step}: {'; '.join(part for part in parts if part)}")
