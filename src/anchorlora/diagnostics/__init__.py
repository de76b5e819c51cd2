"""Measure what moved since the task's start, and how much of it lies on protected directions.  Factors are read, never written."""

from anchorlora.diagnostics.drift import Drift, held_out_drift, measure, predicted_kl, rho_on
from anchorlora.diagnostics.trace import Trace

__all__ = ["Drift", "Trace", "held_out_drift", "measure", "predicted_kl", "rho_on"]
