"""Measure what moved since the task's start or between two checkpoints, and how much of it lies on protected directions.

Factors are read, never written.
"""

from anchorlora.measurement.checkpoints import audit
from anchorlora.measurement.directions import EarlierRows, FeatureCores, WeightDirections
from anchorlora.measurement.drift import Drift, held_out_drift, measure, predicted_kl, rho_on
from anchorlora.measurement.recorder import StepRecorder, Trace, record_steps
from anchorlora.measurement.result import AuditResult
from anchorlora.models.cores_from_text import CoreRule, cores_from_data

__all__ = [
    "AuditResult",
    "CoreRule",
    "Drift",
    "EarlierRows",
    "FeatureCores",
    "StepRecorder",
    "Trace",
    "WeightDirections",
    "audit",
    "cores_from_data",
    "held_out_drift",
    "measure",
    "predicted_kl",
    "record_steps",
    "rho_on",
]
