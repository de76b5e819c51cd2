"""Compare two checkpoints: how far the weights moved, and whether the protected directions were preserved."""

from anchorlora.audits.checkpoints import audit
from anchorlora.audits.cores_from_text import cores_from_data
from anchorlora.audits.directions import EarlierRows, FeatureCores, WeightDirections
from anchorlora.audits.recorder import StepRecorder, record_steps
from anchorlora.audits.result import AuditResult

__all__ = [
    "AuditResult",
    "EarlierRows",
    "FeatureCores",
    "StepRecorder",
    "WeightDirections",
    "audit",
    "cores_from_data",
    "record_steps",
]
