"""Predeclared candidates of the tunable methods, as data: four each, named before any run.

Where a penalty's strength only means something beside the size of gradients and steps, the candidates stand for the reference
below and are scaled by one power of ten for another backbone, measured before any validation run (`experiments/scales.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scaled = Literal["as declared", "fisher", "sparsity"]


@dataclass(frozen=True)
class Tunable:
    """parameter: "Part.field" as `Method.changed` takes it."""

    parameter: str
    candidates: tuple[float, ...]
    scaled: Scaled = "as declared"


@dataclass(frozen=True)
class Reference:
    """The gradients and steps that the declared strengths were thought out for (an 8B backbone)."""

    gradient: float = 5.5e-4  # root mean square of a factor entry's gradient, one example
    step_gradient: float = 3.6e-4  # the same of B, mean over the examples of an optimizer step
    sparsity_gradient: float = 42.0  # the same of the sparsity penalty at strength 1
    learning_rate: float = 1e-4


REFERENCE = Reference()
TUNABLE = {
    "ewc": Tunable("FisherAnchor.strength", (1e3, 1e4, 1e5, 1e6), "fisher"),
    "lwf": Tunable("Distillation.strength", (0.1, 0.5, 1.0, 2.0)),
    "n-lora": Tunable("EffectiveSparsity.strength", (1e-7, 1e-6, 1e-5, 1e-4), "sparsity"),
    "sd-lora": Tunable("GatedPerTask.learning_rate", (1e-4, 1e-3, 1e-2, 5e-2)),
    "o-lora-effective": Tunable("EffectiveResponse.strength", (0.01, 0.1, 1.0, 10.0)),
    "o-lora-bsr": Tunable("EffectiveResponse.strength", (0.01, 0.1, 1.0, 10.0)),
    "o-lora-bsr-strong": Tunable("EffectiveResponse.strength", (1e4, 1e5, 1e6, 1e7)),  # a row of our own
}
