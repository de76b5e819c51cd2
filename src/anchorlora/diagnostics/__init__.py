"""Measure what moved and how much of it was protected.  Reads factors, never writes them."""

from anchorlora.diagnostics.drift import Drift, held_out_drift, measure, rho_on
from anchorlora.diagnostics.trace import Trace

__all__ = ["Drift", "Trace", "held_out_drift", "measure", "rho_on"]
