"""Which rows should a core be made of? Cores of other rows than the protocol's first 128, for docs/lab/results-mini.md.

F=benchmarks/core_rows.py
anchorlora grid mini --methods $F:first20,$F:spread20,$F:answers20,$F:sensitive20,$F:spread64,$F:answers64 --out OUT/rows

Every method here is a block per task whose start and steps stay off its core; only the core differs. It is made at the end of a
task, from the rows that the finished model reads in 64 of its examples:

first       the first 128 rows, so of a few examples; the protocol takes these too, but during the first steps of training
spread      128 rows of all of them, drawn
answers     rows of the tokens that predict an answer, at most 128
sensitive   all rows, each weighted by how much a drawn answer depends on it (SensitiveCore)

A number is the most directions of a core: 20 with 93 % of the energy, as in the paper, or 64 with 99 %, as in sensitive-core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anchorlora import ActiveConstraint, Anchor, Method, PerTask, ProjectDisplacement, Retract
from anchorlora.constraints import AnswerSensitivity, SensitiveCore
from anchorlora.constraints.base import ProtectsPast
from anchorlora.constraints.recording import record_examples
from anchorlora.geometry import GrowingRows, LayerCore

MEMORY = "core-rows/"


@dataclass(frozen=True)
class CoreOfRows(ProtectsPast):
    """Provide cores of chosen rows of finished tasks; it does nothing to them."""

    which: str
    energy: float = 0.93
    at_most: int = 20
    at_least: int = 4
    rows: int = 128
    examples: int = 64
    reads = MEMORY

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        return ActiveConstraint()

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Rows of all tasks by layer, the finished one included."""
        found: dict[str, list[Tensor]] = {layer.name: [] for layer in anchor.layers}
        with record_examples(anchor, "CoreOfRows") as seen:
            for loss in anchor.losses(self.examples):
                (toward,) = torch.autograd.grad(loss, seen.logits)
                tokens = answering(toward)
                for name, x in seen.inputs().items():
                    found[name].append(x[-tokens - 1 : -1] if self.which == "answers" else x)
        return {
            MEMORY + name: torch.cat([*self._earlier(anchor, name), self._chosen(x)]).float().cpu() for name, x in found.items()
        }

    def _earlier(self, anchor: Anchor, name: str) -> list[Tensor]:
        return [anchor.past[MEMORY + name]] if MEMORY + name in anchor.past else []

    def _chosen(self, examples: list[Tensor]) -> Tensor:
        rows = torch.cat(examples).cpu()
        if self.which == "spread":
            rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        return rows[: self.rows]

    def cores(self, past: Mapping[str, Tensor]) -> dict[str, LayerCore]:
        found = {}
        for name, rows in past.items():
            if name.startswith(MEMORY):
                grown = GrowingRows()
                grown.add(rows)
                spectrum = grown.spectrum(self.at_most)
                star, known = spectrum.k_star(self.energy), spectrum.directions.shape[1]
                k = min(max(star or self.at_most, self.at_least), self.at_most, known)
                core = spectrum.leading(k).to(device="cpu")
                found[name.removeprefix(MEMORY)] = LayerCore(core, core, star, spectrum.retained(k), spectrum.rows)
        return found


def answering(toward: Tensor) -> int:
    """How many positions predict an answer: those whose logits the loss depends on, all but the last of the row."""
    return int((toward.abs().flatten(0, -2).sum(-1) > 0).sum())


def kept(name: str, *core: ProtectsPast) -> Method:
    return Method(name, PerTask(), (*core, Retract("A"), ProjectDisplacement("A")))


first20 = kept("first20", CoreOfRows("first"))
spread20 = kept("spread20", CoreOfRows("spread"))
answers20 = kept("answers20", CoreOfRows("answers"))
sensitive20 = kept("sensitive20", AnswerSensitivity(), SensitiveCore(0.93, 4, 20))
spread64 = kept("spread64", CoreOfRows("spread", energy=0.99, at_most=64))
answers64 = kept("answers64", CoreOfRows("answers", energy=0.99, at_most=64))
