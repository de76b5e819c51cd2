"""Collect feature rows and turn them into protected subspaces."""

from anchorlora.features.files import read_cores, write_cores
from anchorlora.features.store import LayerCore, RowStore

__all__ = ["LayerCore", "RowStore", "read_cores", "write_cores"]
