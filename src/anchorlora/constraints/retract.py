"""Retraction of a fresh block: A_0 <- A_0 P   (paper, eq. 16).

    A_0  (r, d_in)  start of the routing factor      V  (d_in, k)  core      P = I - V V^T, never formed

It changes no output while B = 0 and makes the state feasible: A V = 0, hence B A V = 0 for any later B. A block whose state is
feasible already, such as one whose training is resumed, is left as it is; if its start has B = 0, A_0 becomes the present A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of, exact_factor, reads_core
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class Retract(ProtectsPast):
    """Move a new block's start into the complement of the core: A_0 <- A_0 P   (paper, eq. 16).

    The factor and its start move together. With `ProjectDisplacement("A")` A V = 0 holds throughout, and B may train.

    Args:
        factor: The factor to retract, "A".

    Example:
        >>> from anchorlora import Anchor, Retract
        >>> model = tiny()
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> with torch.no_grad():
        ...     _ = Retract("A").begin_task(anchor)
        >>> layer = anchor.layers[0]
        >>> bool((layer.factor("A") @ layer.core.basis).norm() < 1e-6)
        True
    """

    factor: str = "A"

    @property
    def closes(self) -> tuple[str, ...]:
        """The start of a new block, which does not read the core."""
        return ("start",) if self.factor == "A" else ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Retract the factor of every layer, once.

        Args:
            anchor: The task's anchor, with cores.

        Returns:
            A constraint without hooks: there is nothing more to do.

        Raises:
            InvalidValue: The other factor is not zero, so retraction would change the function; or a layer has no core.
            InvalidType: The factor is not stored in float32 or float64.
        """
        other = "B" if self.factor == "A" else "A"
        for layer in anchor.layers:
            rows, core = exact_factor(layer, self.factor), core_of(layer, self.factor)
            if getattr(layer.current.whole(), other).any():  # in any process
                if reads_core(layer, self.factor):
                    raise InvalidValue(
                        f"retracting {self.factor} at {layer.name} would change the function: {other} is not zero there; "
                        'retract a new block before its first step; a learned one takes Freeze("B"), ProjectDisplacement("A")'
                    )
                if getattr(layer.start.whole(), other).any():
                    continue
            else:
                rows.copy_(core.outside(in_float64(rows)))
            layer.start_rows(self.factor).copy_(rows)
        return ActiveConstraint()
