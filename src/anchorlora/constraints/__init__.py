"""Constraints on LoRA factors, one idea a file, put on any torch optimizer by `protect`."""

from anchorlora.constraints.base import Constraint, Held, protect
from anchorlora.constraints.displacement import ProjectDisplacement, ProjectStep
from anchorlora.constraints.effective import EffectiveResponse
from anchorlora.constraints.freeze import Freeze
from anchorlora.constraints.gradient import ProjectGradient
from anchorlora.constraints.overlap import RoutingOverlap
from anchorlora.constraints.retract import Retract

__all__ = [
    "Constraint",
    "EffectiveResponse",
    "Freeze",
    "Held",
    "ProjectDisplacement",
    "ProjectGradient",
    "ProjectStep",
    "Retract",
    "RoutingOverlap",
    "protect",
]
