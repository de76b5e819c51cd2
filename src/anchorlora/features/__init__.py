"""Collect feature rows and turn them into protected subspaces."""

from anchorlora.features.files import read_cores, write_cores
from anchorlora.features.store import FeatureStore, LayerCore

__all__ = ["FeatureStore", "LayerCore", "read_cores", "write_cores"]
