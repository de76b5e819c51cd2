"""Constraints on LoRA factors, one idea a file, put on any torch optimizer by `protect`."""

from anchorlora.constraints.base import ActiveConstraint as ActiveConstraint
from anchorlora.constraints.base import Constraint as Constraint
from anchorlora.constraints.brake import KroneckerBrake as KroneckerBrake
from anchorlora.constraints.displacement import ProjectDisplacement as ProjectDisplacement
from anchorlora.constraints.displacement import ProjectStep as ProjectStep
from anchorlora.constraints.distillation import Distillation as Distillation
from anchorlora.constraints.effective import EffectiveResponse as EffectiveResponse
from anchorlora.constraints.fisher import FisherAnchor as FisherAnchor
from anchorlora.constraints.freeze import Freeze as Freeze
from anchorlora.constraints.gradient import ProjectGradient as ProjectGradient
from anchorlora.constraints.gradient_start import GradientStart as GradientStart
from anchorlora.constraints.input_start import InputStart as InputStart
from anchorlora.constraints.null_start import NullStart as NullStart
from anchorlora.constraints.optimizers import holds_factors as holds_factors
from anchorlora.constraints.optimizers import innermost as innermost
from anchorlora.constraints.overlap import RoutingOverlap as RoutingOverlap
from anchorlora.constraints.protect import create_protected_optimizer as create_protected_optimizer
from anchorlora.constraints.protect import protect as protect
from anchorlora.constraints.retract import Retract as Retract
from anchorlora.constraints.sensitivity import AnswerSensitivity as AnswerSensitivity
from anchorlora.constraints.sensitivity import SensitiveCore as SensitiveCore
from anchorlora.constraints.singular import ProjectSingular as ProjectSingular
from anchorlora.constraints.sparsity import EffectiveSparsity as EffectiveSparsity
from anchorlora.constraints.split import RankSplit as RankSplit
