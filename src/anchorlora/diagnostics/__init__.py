"""Measuring: what moved, what of it was protected.  Reads factors, never writes them."""

from anchorlora.diagnostics.beliefs import EarlierRows, FeatureCores, WeightDirections
from anchorlora.diagnostics.drift import Drift, held_out_drift, measure, rho_on
from anchorlora.diagnostics.recorder import Audit, auditing
from anchorlora.diagnostics.trace import Trace

__all__ = [
    "Audit",
    "Drift",
    "EarlierRows",
    "FeatureCores",
    "Trace",
    "WeightDirections",
    "auditing",
    "held_out_drift",
    "measure",
    "rho_on",
]
