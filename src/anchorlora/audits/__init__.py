"""Compare two checkpoints: how far the weights moved, and whether the protected directions were preserved."""

from anchorlora.audits.cores_from_text import cores_from_data
from anchorlora.audits.directions import EarlierRows, FeatureCores, WeightDirections
from anchorlora.audits.recorder import Audit, auditing

__all__ = ["Audit", "EarlierRows", "FeatureCores", "WeightDirections", "auditing", "cores_from_data"]
