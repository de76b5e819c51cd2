"""Plans of one shared adapter and of a block per task; others are files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import Constraint
from anchorlora.data.rehearsal import Rehearsal
from anchorlora.errors import InvalidValue
from anchorlora.methods.adapter_plan import LR_RATIO
from anchorlora.methods.base import Method

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anchorlora.adapters import AdapterStack
    from anchorlora.geometry import Factors
    from anchorlora.methods.adapter_plan import TaskEnd


class BeginsSum:
    """Base of plans that begin a sum: `plan + constraint` is a method without a name."""

    def __add__(self, part: Constraint | Rehearsal) -> Method:
        return Method.of(self) + part


class TrainsItsBlock(BeginsSum):
    """Base of plans that train the current block and whose saved adapter says everything."""

    only_block = True

    def param_groups(self, stack: AdapterStack) -> list[dict[str, Any]]:
        """Return one group with both factors of the current block."""
        return [{"params": stack.trainable()}]

    def state(self, stack: AdapterStack) -> dict[str, Tensor]:
        """Return nothing: the saved adapter suffices."""
        return {}


@dataclass(frozen=True)
class Shared(TrainsItsBlock):
    """One adapter for the whole sequence. Each task starts where the last one ended, at a learned anchor.

    With a `ratio` above 1 it is LoRA+ (Hayou, Ghosh and Yu 2024, arXiv 2402.12354): A trains at the run's learning rate and B at
    `ratio` times that. LoRA+ advises to tune the rate together with the ratio; here the rate is that of all methods.

    Args:
        ratio: Learning rate of B divided by that of A.

    Raises:
        InvalidValue: The ratio is not a finite number above 0.

    Example:
        >>> from anchorlora import Freeze, ProjectDisplacement, Shared
        >>> mine = Shared() + Freeze("B") + ProjectDisplacement("A")
        >>> mine.preserves.words
        'displacement, delta_b, response'
    """

    ratio: float = field(default=1.0, kw_only=True)
    family = "shared"
    fresh = False

    def __post_init__(self) -> None:
        if not 0 < self.ratio < float("inf"):
            raise InvalidValue(f"Shared(ratio=..) must be a finite number above 0, not {self.ratio}; 1.0 trains A and B alike")

    def begin_task(self, stack: AdapterStack, generator: torch.Generator, *, first: bool) -> None:
        """Open the adapter at the first task; later tasks go on with it.

        Args:
            stack: The model's adapters.
            generator: Source of the random start of A.
            first: True for the first task.
        """
        if first:
            stack.open(generator)

    def end_task(self, stack: AdapterStack, end: TaskEnd) -> None:
        """Leave the adapter as it is.

        Args:
            stack: The model's adapters.
            end: Not used.
        """

    def param_groups(self, stack: AdapterStack) -> list[dict[str, Any]]:
        """Return one group with both factors, or with a ratio one with every A and one with every B.

        Args:
            stack: The model's adapters.
        """
        if self.ratio == 1:
            return super().param_groups(stack)
        factors = stack.trainable()
        return [{"params": factors[::2]}, {"params": factors[1::2], LR_RATIO: self.ratio}]

    def resume(self, stack: AdapterStack, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        """Load the saved factors into the shared adapter.

        Args:
            stack: The model's adapters.
            factors: Layer path -> factors of the saved adapter.
            state: Not used.
        """
        stack.restore(factors, as_history=False)


@dataclass(frozen=True)
class PerTask(TrainsItsBlock):
    """A new block per task, with B = 0 at its start. Earlier blocks are frozen and summed.

    With `orthogonal`, and `Freeze("A", first_task=1)` beside it, it is Orthogonal Adaptation (Po, Yang, Aberman and Wetzstein,
    CVPR 2024, arXiv 2312.02432), which freezes the routing factor of every block, keeps those of different blocks orthogonal and
    sums the blocks. What differs: the paper takes rows of one random orthogonal matrix that all blocks share, and they may repeat
    by chance; here each block's rows are drawn at random in the complement of all earlier ones, so that A_s A_t^T = 0 up to
    rounding. The paper trains each block from the base model alone; here earlier blocks are active, as in all methods. Rows have
    the norm of PEFT's uniform start, 1/sqrt(3), not 1.

    Args:
        orthogonal: Start A orthogonal to the rows of all earlier blocks.

    Example:
        >>> from anchorlora import PerTask, ProjectDisplacement, Retract
        >>> mine = PerTask() + Retract("A") + ProjectDisplacement("A")
        >>> mine.preserves.words
        'displacement, state, response'
    """

    orthogonal: bool = field(default=False, kw_only=True)
    family = "cumulative"
    fresh = True
    grows = True

    def begin_task(self, stack: AdapterStack, generator: torch.Generator, *, first: bool) -> None:
        """Open a new block.

        Args:
            stack: The model's adapters.
            generator: Source of the random start of A.
            first: True for the first task; every task opens a block.
        """
        stack.open(generator, orthogonal=self.orthogonal)

    def end_task(self, stack: AdapterStack, end: TaskEnd) -> None:
        """Freeze the block and stack it onto the history.

        Args:
            stack: The model's adapters.
            end: Not used.
        """
        stack.fold()

    def resume(self, stack: AdapterStack, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        """Load the stacked blocks as frozen history.

        Args:
            stack: The model's adapters.
            factors: Layer path -> stacked factors of all finished tasks.
            state: Not used.
        """
        stack.restore(factors, as_history=True)
