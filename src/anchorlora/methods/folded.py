"""Blocks folded into a history of constant rank: what is stored does not grow with the number of tasks.

    F = s [B_h, B] [A_h; A]  (d_out, d_in), the history and the finished block      V = [core that was kept, core to keep]
    F' = Pi F of rank R with F' V = F V, and nearest elsewhere in the metric of what earlier answers depend on

See `geometry/spiked.py` for Pi. Both cores are kept: what the finished task had to keep holds in the adapter that is saved after
it, and what the next task must keep is there to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.errors import InvalidValue
from anchorlora.methods.plans import PerTask

if TYPE_CHECKING:
    from anchorlora.adapters import AdapterStack
    from anchorlora.constraints import Constraint
    from anchorlora.geometry import Factors
    from anchorlora.methods.adapter_plan import TaskEnd


@dataclass(frozen=True)
class FoldedPerTask(PerTask):
    """A new block per task, folded at its end into a history of constant rank that answers the core exactly as before.

    With `AnswerSensitivity` beside it the rest is nearest in what earlier answers depend on, else in Frobenius norm.

    Args:
        rank: Rank R of the history, and of the adapter that is saved. It must hold the core that was kept and the one to keep.

    Example:
        >>> from anchorlora import ProjectDisplacement, Retract
        >>> from anchorlora.methods import FoldedPerTask
        >>> mine = FoldedPerTask(16) + Retract("A") + ProjectDisplacement("A")
        >>> mine.preserves.words
        'displacement, state, response'
    """

    rank: int = 16
    rewrites = True
    grows = False

    def refuse_beside(self, constraints: Iterable[Constraint]) -> None:
        """Refuse cores that the rank cannot hold, before a task is trained.

        Args:
            constraints: Those of the method.

        Raises:
            InvalidValue: Two cores of the largest size have more directions than the rank.
        """
        most = max((getattr(part, "at_most", 0) for part in constraints), default=0)
        if 2 * most > self.rank:
            raise InvalidValue(
                f"a history of rank {self.rank} cannot keep two cores of {most} directions; set FoldedPerTask.rank to at least "
                f"{2 * most}, or SensitiveCore.at_most to at most {self.rank // 2}"
            )

    def cuts(self, rank: int) -> bool:
        """Return whether blocks of that rank in all are cut when a task ends, by what `AnswerSensitivity` remembers.

        Args:
            rank: Of the history and the finished block together.
        """
        return rank > self.rank

    def end_task(self, stack: AdapterStack, end: TaskEnd) -> None:
        """Fold the finished block into the history.

        Args:
            stack: The model's adapters.
            end: The cores to keep, and what `AnswerSensitivity` remembers.

        Raises:
            InvalidValue: The cores have more directions than the rank can keep.
        """
        grown = stack.stacked()
        stack.check_history()
        stack.restore({layer: self._fold(layer, factors, end) for layer, factors in grown.items()}, as_history=True)

    def _fold(self, layer: str, factors: Factors, end: TaskEnd) -> Factors:
        from anchorlora.constraints.sensitivity import knows, sensitivity
        from anchorlora.geometry import folded

        before, after = end.protected.get(layer), end.cores.get(layer)
        keep = after if before is None else before if after is None else before.joined(after)
        inputs = outputs = None
        if knows(end.past):
            inputs, outputs = sensitivity(end.past, layer, d_in=factors.A.shape[1], d_out=factors.B.shape[0])
        return folded(factors, self.rank, keep=keep, inputs=inputs, outputs=outputs)
