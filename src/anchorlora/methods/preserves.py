"""Which conditions on the protected subspace V hold after every task but the first, whatever the optimizer.

    displacement  dA V = 0    A did not move on V
    state         A V = 0     A does not read V
    delta_b       dB = 0      B did not move, so the term s dB A_0 V of a learned anchor vanishes
    response      dW V = 0    the layer answers inputs in V as before: rho is zero up to float32 rounding

One condition is on the k leading singular directions U_k, V_k of the frozen weight instead, and holds from the first task on:

    singular      U_k^T dW = 0 and dW V_k = 0    the leading singular triples of the weight stay as they are

`Preserves.derived` reads them off what each constraint closes: one of these, start (A_0 V = 0), or delta_b_term (dB A_0 V = 0).

    s (B A - B_0 A_0) V = s B_0 dA V + s dB A_0 V + s dB dA V

vanishes if dA V = 0 and dB A_0 V = 0 (as where dB = 0), or if A V = A_0 V = 0. The condition on singular directions implies none
of those on V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from anchorlora.constraints import Constraint

CLOSABLE = ("displacement", "start", "state", "delta_b", "delta_b_term", "response", "singular")


@dataclass(frozen=True)
class Preserves:
    """The conditions that a method promises from its second task on.

    A method carries its promise as `Method.preserves`. `anchorlora check` measures each promised condition, and a run whose method
    promises the response stops when rho exceeds what float32 rounding explains.

    Args:
        displacement: dA V = 0. A does not move on the protected subspace.
        state: A V = 0. A does not read the protected subspace.
        delta_b: dB = 0. B does not move, so the ΔB term s dB A_0 V vanishes.
        response: dW V = 0. The layer's effective change does not touch the protected subspace.
        singular: U_k^T dW = 0 and dW V_k = 0. The leading singular triples of the frozen weight stay as they are.

    Example:
        >>> from anchorlora.methods import METHODS, Preserves
        >>> METHODS["sfor"].preserves == Preserves(displacement=True, delta_b=True, response=True)
        True
    """

    displacement: bool = False
    state: bool = False
    delta_b: bool = False
    response: bool = False
    singular: bool = False

    @classmethod
    def derived(cls, plan: Any, constraints: Sequence[Constraint]) -> Preserves:
        """Derive what a plan and its constraints guarantee.

        A constraint says in its attribute `closes` what it guarantees; one without it adds nothing. `ProjectStep` has none: its
        roundings accumulate, so after a few hundred steps it exceeds the tolerance.

        Args:
            plan: How adapters come and go. Its attribute `fresh` says that each task trains a new block with B = 0, and
                `only_block` that a layer changes only by what the current block adds. Both are False where they are missing.
            constraints: The constraints of the method, in any order.

        Returns:
            The conditions that follow from these parts alone.

        Raises:
            InvalidValue: A constraint closes something that is none of `CLOSABLE`.

        Example:
            >>> from anchorlora import PerTask, ProjectDisplacement, Retract
            >>> from anchorlora.methods import Preserves
            >>> Preserves.derived(PerTask(), [Retract("A"), ProjectDisplacement("A")]).words
            'displacement, state, response'
        """
        fresh, only_block = (bool(getattr(plan, name, False)) for name in ("fresh", "only_block"))
        closed = {name for c in constraints if c.first_task <= 2 for name in _closes(c)}
        displacement, delta_b = "displacement" in closed, "delta_b" in closed
        state = "state" in closed or (fresh and displacement and "start" in closed)
        still = delta_b or "delta_b_term" in closed  # dB A_0 V = 0
        response = only_block and ("response" in closed or state or (displacement and still))
        return cls(displacement, state, delta_b, response, only_block and "singular" in closed)

    @property
    def names(self) -> tuple[str, ...]:
        """The preserved conditions, such as ("displacement", "delta_b")."""
        return tuple(condition.name for condition in fields(self) if getattr(self, condition.name))

    @property
    def words(self) -> str:
        """The preserved conditions as tables print them, such as "displacement, delta_b", or "none"."""
        return ", ".join(self.names) or "none"


def _closes(constraint: Constraint) -> tuple[str, ...]:
    """Return the conditions that a constraint closes; refuse one that is not known."""
    closes = tuple(getattr(constraint, "closes", ()))
    if odd := [name for name in closes if name not in CLOSABLE]:
        raise InvalidValue(f"{type(constraint).__name__} closes {odd[0]!r:.40}; what can be closed: {', '.join(CLOSABLE)}")
    return closes
