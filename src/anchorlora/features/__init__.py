"""Collect feature rows and turn them into protected subspaces."""

from anchorlora.features.files import read_cores as read_cores
from anchorlora.features.files import write_cores as write_cores
from anchorlora.features.store import FeatureStore as FeatureStore
from anchorlora.features.store import LayerCore as LayerCore
