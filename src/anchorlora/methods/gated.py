"""Gated blocks: a new block per task, and one trainable scalar per block that weighs it from then on   (SD-LoRA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from anchorlora.devices import torch
from anchorlora.errors import InvalidValue
from anchorlora.methods.plans import BeginsSum

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdapterStack
    from anchorlora.geometry import Factors
    from anchorlora.methods.adapter_plan import TaskEnd


@dataclass(frozen=True)
class GatedPerTask(BeginsSum):
    """A new block per task, as in `PerTask`, with one gate per block; the gates of all blocks keep training (SD-LoRA).

    Args:
        learning_rate: Learning rate of the gates; the rate of the factors would hardly move them.
        start: Gate of a new block (official SD-LoRA code: 0.8).
        normalize: By what a finished block is divided: "network", one size for all layers, or "layer", each layer's own.

    Raises:
        InvalidValue: `normalize` is neither.

    Example:
        >>> from anchorlora import GatedPerTask, ProjectDisplacement, Retract
        >>> mine = GatedPerTask() + Retract("A") + ProjectDisplacement("A")
        >>> mine.preserves.words  # the gates of earlier blocks move, so the response is not preserved
        'displacement, state'
    """

    learning_rate: float = 1e-2
    start: float = 0.8
    normalize: Literal["network", "layer"] = field(default="network", kw_only=True)
    family = "cumulative"
    fresh = True
    grows = True
    only_block = False

    def __post_init__(self) -> None:
        """Refuse another way to normalize."""
        if self.normalize not in ("network", "layer"):
            raise InvalidValue(f"a block is normalized by 'network' or by 'layer', not by {self.normalize!r:.40}")

    def begin_task(self, stack: AdapterStack, generator: torch.Generator, *, first: bool) -> None:
        """Open a new block and its gate.

        Args:
            stack: The model's adapters.
            generator: Source of the random start of A.
            first: True for the first task; every task opens a block.
        """
        from anchorlora.adapters import Gates

        if stack.gates is None:
            stack.gates = Gates.none(next(stack.model.parameters()).device, by_layer=self.normalize == "layer")
        stack.gates.open(self.start)
        stack.open(generator)

    def end_task(self, stack: AdapterStack, end: TaskEnd) -> None:
        """Freeze the block, fix the size that its gate weighs, and stack it onto the history.

        Args:
            stack: The model's adapters.
            end: Not used.
        """
        assert stack.gates is not None
        stack.gates.close(stack.newest())
        stack.fold()

    def param_groups(self, stack: AdapterStack) -> list[dict[str, Any]]:
        """Return the current block's factors, and all gates at their own learning rate.

        Args:
            stack: The model's adapters.
        """
        assert stack.gates is not None
        return [{"params": stack.trainable()}, {"params": [stack.gates.values], "lr": self.learning_rate}]

    def state(self, stack: AdapterStack) -> dict[str, Tensor]:
        """Return the gates, and B as it was trained: the saved adapter has the gates multiplied in.

        Args:
            stack: The model's adapters.

        Returns:
            "values" and "sizes" of the gates (number of blocks), those of each layer, and "B/<layer path>" (d_out, r).
        """
        assert stack.gates is not None
        return stack.gates.state() | {f"B/{layer}": f.B for layer, f in stack.stacked().items()}

    def resume(self, stack: AdapterStack, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        """Load the stacked blocks as frozen history, with their gates.

        Args:
            stack: The model's adapters.
            factors: Layer path -> stacked factors of the saved adapter.
            state: What `state` returned.

        Raises:
            InvalidValue: The gates do not fit the factors.
        """
        from anchorlora.adapters import Gates
        from anchorlora.geometry import Factors

        layers = list(factors) if self.normalize == "layer" else None
        _refuse_misfit(state, factors, stack.rank, Gates.names(layers))
        stack.gates = Gates.resumed(state, next(stack.model.parameters()).device, layers)
        saved = {layer: Factors(f.A, state[f"B/{layer}"], f.scale) for layer, f in factors.items()}
        stack.restore(saved, as_history=True)


def _refuse_misfit(state: Mapping[str, Tensor], factors: Mapping[str, Factors], rank: int, names: list[str]) -> None:
    count = len(next(iter(factors.values())).A) // rank
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(names, ((count,), torch.float32))
    wanted |= {f"B/{layer}": (tuple(f.B.shape), f.B.dtype) for layer, f in factors.items()}
    for name, (shape, dtype) in wanted.items():
        if (tuple(state[name].shape), state[name].dtype) != (shape, dtype):
            raise InvalidValue(f"{name} of the saved gates is {state[name].dtype} {tuple(state[name].shape)}, not {dtype} {shape}")
