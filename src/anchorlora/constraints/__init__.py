"""Constraints on LoRA factors, one idea a file, put on any torch optimizer by `protect`."""

from anchorlora.constraints.base import ActiveConstraint, Constraint
from anchorlora.constraints.brake import KroneckerBrake
from anchorlora.constraints.created import create_protected_optimizer
from anchorlora.constraints.displacement import ProjectDisplacement, ProjectStep
from anchorlora.constraints.distillation import Distillation
from anchorlora.constraints.effective import EffectiveResponse
from anchorlora.constraints.fisher import FisherAnchor
from anchorlora.constraints.freeze import Freeze
from anchorlora.constraints.gradient import ProjectGradient
from anchorlora.constraints.gradient_start import GradientStart
from anchorlora.constraints.input_start import InputStart
from anchorlora.constraints.null_start import NullStart
from anchorlora.constraints.optimizers import holds_factors, innermost
from anchorlora.constraints.overlap import RoutingOverlap
from anchorlora.constraints.protect import protect
from anchorlora.constraints.retract import Retract
from anchorlora.constraints.sensitivity import AnswerSensitivity, SensitiveCore
from anchorlora.constraints.singular import ProjectSingular
from anchorlora.constraints.sparsity import EffectiveSparsity
from anchorlora.constraints.split import RankSplit

__all__ = [
    "ActiveConstraint",
    "AnswerSensitivity",
    "Constraint",
    "Distillation",
    "EffectiveResponse",
    "EffectiveSparsity",
    "FisherAnchor",
    "Freeze",
    "GradientStart",
    "InputStart",
    "KroneckerBrake",
    "NullStart",
    "ProjectDisplacement",
    "ProjectGradient",
    "ProjectSingular",
    "ProjectStep",
    "RankSplit",
    "Retract",
    "RoutingOverlap",
    "SensitiveCore",
    "create_protected_optimizer",
    "holds_factors",
    "innermost",
    "protect",
]
