"""The interface of plans: how adapters come and go over the tasks, and what a plan may know when one ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anchorlora.adapters import AdapterStack
    from anchorlora.geometry import Factors, Subspace

LR_RATIO = "lr_ratio"  # of a parameter group: its learning rate divided by the run's


@dataclass(frozen=True, eq=False)
class TaskEnd:
    """The facts that an adapter plan may know at the end of a task.

    Args:
        protected: Layer path -> core that the finished task had to keep; empty after the first task.
        cores: Layer path -> core that the next task must keep.
        past: What constraints remember of all finished tasks, by name; see `Constraint.end_task`.
        draw: CPU generator of what the plan draws at the end of this task, of the run's seed; None where nothing may be drawn.
    """

    protected: Mapping[str, Subspace] = field(default_factory=dict)
    cores: Mapping[str, Subspace] = field(default_factory=dict)
    past: Mapping[str, Tensor] = field(default_factory=dict)
    draw: torch.Generator | None = None


@runtime_checkable
class AdapterPlan(Protocol):
    """How adapters come and go over a sequence of tasks.

    Four more class attributes are False where a plan lacks them. `Preserves.derived` reads `fresh`, each task trains a new block
    with B = 0, and `only_block`, a layer changes only by what the current block adds. Where `rewrites` is True, `end_task` changes
    the function, and the drift of a task is measured after it. Where `grows` is True, the stored adapter grows with every task.
    `cuts(rank)`, where a plan that rewrites has it, says whether blocks of that rank in all are.
    `refuse_beside(constraints)`, where a plan has it, refuses constraints when a method is made.
    """

    family: str

    def begin_task(self, stack: AdapterStack, generator: torch.Generator, *, first: bool) -> None:
        """Prepare the adapter that the next task trains.

        Args:
            stack: The model's adapters.
            generator: Source of the random start of a new block.
            first: True for the first task of the sequence.
        """

    def end_task(self, stack: AdapterStack, end: TaskEnd) -> None:
        """Leave the adapters as the next task must find them.

        Args:
            stack: The model's adapters, with the finished task's block still current.
            end: What was protected, what will be, and what constraints remember.
        """

    def param_groups(self, stack: AdapterStack) -> list[dict[str, Any]]:
        """Return what the optimizer trains.

        Args:
            stack: The model's adapters.

        Returns:
            Parameter groups as torch optimizers take them. In one without "lr", "lr_ratio" multiplies the run's learning rate.
        """

    def state(self, stack: AdapterStack) -> dict[str, Tensor]:
        """Return what `resume` needs besides the saved adapter.

        Args:
            stack: The model's adapters, after a task.

        Returns:
            Name -> tensor; empty where the adapter says everything.
        """

    def resume(self, stack: AdapterStack, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        """Continue after a finished task.

        Args:
            stack: The model's adapters, as new.
            factors: Layer path -> factors of the saved adapter.
            state: What `state` returned when the task was saved.
        """
