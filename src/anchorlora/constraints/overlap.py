"""The O-LoRA penalty: lambda sum_l |A_<t A_t^T|_1, entrywise, on routing factors   (paper, eq. 14; official O-LoRA code).

    A_<t  (r (t-1), d_in)  stacked rows of earlier blocks      A_t  (r, d_in)  current rows

Gradient on A_t: lambda sign(A_t A_<t^T) A_<t. No mean over layers, ranks or tasks, and the scale s does not enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, Penalty, ProtectsPast
from anchorlora.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class RoutingOverlap(ProtectsPast):
    """Penalize the overlap of the current rows of A with those of earlier blocks   (O-LoRA; paper, eq. 14).

        lambda sum_l |A_<t A_t^T|_1, entrywise

    Args:
        strength: Weight lambda of the penalty.

    Example:
        >>> from anchorlora import Anchor, RoutingOverlap
        >>> from anchorlora.adapters import activate
        >>> model = tiny()
        >>> model.add_adapter("earlier", model.peft_config["default"])
        >>> activate(model, "default", history="earlier")
        >>> anchor = Anchor.of(model, adapter_name="default", history="earlier")
        >>> active = RoutingOverlap(0.5).begin_task(anchor)
        >>> with torch.no_grad():
        ...     active.add_penalty_grads()
        >>> active.readings()["overlap"] > 0
        True
    """

    strength: float = 0.5
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to penalize the current block.

        Args:
            anchor: The task's anchor, with the frozen blocks of earlier tasks as history.

        Raises:
            InvalidValue: A layer has no history.
            InvalidType: Factors are split over processes (FSDP2).
        """
        for layer in anchor.layers:
            if layer.history is None:
                raise InvalidValue(
                    f"RoutingOverlap needs the frozen rows of earlier blocks, and {layer.name} has none; "
                    "pass history= to Anchor.of, or use a method with a block per task"
                )
        return _Overlapping("overlap", self.strength, anchor)


class _Overlapping(Penalty):
    reads = ("A",)

    def stacked(self, stack) -> tuple[Tensor, dict[str, Tensor]]:
        past = stack.once("past", lambda: stack.of(lambda layer: layer.history.A.detach()))
        overlap = stack.product(stack.factor("A"), past.mT)
        return overlap.abs().sum(), {"A": stack.product(overlap.sign(), past)}
