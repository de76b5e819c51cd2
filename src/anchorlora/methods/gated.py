"""Blocks with gates: a fresh block per task, and one trainable scalar a block that weighs it from then on   (SD-LoRA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anchorlora.errors import InvalidValue
from anchorlora.methods.base import BeginsSum

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anchorlora.adapters import AdapterStack
    from anchorlora.geometry import Factors


@dataclass(frozen=True)
class GatedPerTask(BeginsSum):
    """As `PerTask`, but the gates of all blocks train on.

    learning_rate  of the gates, which the blocks' rate would hardly move      start  a new block's gate (official: 0.8)
    """

    learning_rate: float = 1e-2
    start: float = 0.8
    family = "cumulative"

    def begin(self, blocks: AdapterStack, generator: torch.Generator, *, first: bool) -> None:
        from anchorlora.adapters import Gates

        if blocks.gates is None:
            blocks.gates = Gates.none(next(blocks.model.parameters()).device)
        blocks.gates.open(self.start)
        blocks.open(generator)

    def finish(self, blocks: AdapterStack) -> None:
        assert blocks.gates is not None
        blocks.gates.close(blocks.newest())
        blocks.fold()

    def groups(self, blocks: AdapterStack) -> list[dict[str, Any]]:
        assert blocks.gates is not None
        return [{"params": blocks.trainable()}, {"params": [blocks.gates.values], "lr": self.learning_rate}]

    def state(self, blocks: AdapterStack) -> dict[str, Tensor]:
        """The gates, and B as it was trained: the saved adapter has the gates in it."""
        assert blocks.gates is not None
        gates = {"values": blocks.gates.values.detach().clone(), "sizes": blocks.gates.sizes.clone()}
        return gates | {f"B/{layer}": f.B for layer, f in blocks.stacked().items()}

    def resume(self, blocks: AdapterStack, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        from anchorlora.adapters import Gates
        from anchorlora.geometry import Factors

        _refuse_misfit(state, factors, blocks.rank)
        device = next(blocks.model.parameters()).device
        blocks.gates = Gates(state["values"].to(device), state["sizes"].to(device))
        stack = {layer: Factors(f.A, state[f"B/{layer}"], f.scale) for layer, f in factors.items()}
        blocks.restore(stack, as_history=True)


def _refuse_misfit(state: Mapping[str, Tensor], factors: Mapping[str, Factors], rank: int) -> None:
    import torch

    count = len(next(iter(factors.values())).A) // rank
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(("values", "sizes"), ((count,), torch.float32))
    wanted |= {f"B/{layer}": (tuple(f.B.shape), f.B.dtype) for layer, f in factors.items()}
    for name, (shape, dtype) in wanted.items():
        if (tuple(state[name].shape), state[name].dtype) != (shape, dtype):
            raise InvalidValue(f"{name} of the saved gates is {state[name].dtype} {tuple(state[name].shape)}, not {dtype} {shape}")
