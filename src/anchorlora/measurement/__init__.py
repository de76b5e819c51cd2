"""Measure what moved since the task's start or between two checkpoints, and how much of it lies on protected directions.

Factors are read, never written.
"""

from anchorlora.measurement.checkpoints import audit as audit
from anchorlora.measurement.directions import EarlierRows as EarlierRows
from anchorlora.measurement.directions import FeatureCores as FeatureCores
from anchorlora.measurement.directions import WeightDirections as WeightDirections
from anchorlora.measurement.drift import Drift as Drift
from anchorlora.measurement.drift import held_out_drift as held_out_drift
from anchorlora.measurement.drift import measure as measure
from anchorlora.measurement.drift import predicted_kl as predicted_kl
from anchorlora.measurement.drift import rho_on as rho_on
from anchorlora.measurement.recorder import StepRecorder as StepRecorder
from anchorlora.measurement.recorder import Trace as Trace
from anchorlora.measurement.recorder import record_steps as record_steps
from anchorlora.measurement.result import AuditResult as AuditResult
from anchorlora.models.cores_from_text import CoreRule as CoreRule
from anchorlora.models.cores_from_text import cores_from_data as cores_from_data
