"""Measuring: what moved, what of it was protected.  Reads factors, never writes them."""

from anchorlora.diagnostics.drift import Drift, held_out_drift, measure
from anchorlora.diagnostics.trace import Trace

__all__ = ["Drift", "Trace", "held_out_drift", "measure"]
