"""Linear algebra of protected subspaces and thin products.  Imports only torch and can be used alone."""

from anchorlora.geometry.low_rank import Factors, Product, one_scale, scaled_change, singular, truncated
from anchorlora.geometry.room import JoinedCore, joined_within
from anchorlora.geometry.rounding import Rounding, merge_
from anchorlora.geometry.sketch import SketchedRows, growing_rows
from anchorlora.geometry.spectrum import KEPT, GrowingRows, Spectrum
from anchorlora.geometry.spiked import SpikedCovariance, folded
from anchorlora.geometry.subspace import LayerCore, Subspace, in_float32, joined_by_layer, singular_directions

__all__ = [
    "KEPT",
    "Factors",
    "GrowingRows",
    "JoinedCore",
    "LayerCore",
    "Product",
    "Rounding",
    "SketchedRows",
    "Spectrum",
    "SpikedCovariance",
    "Subspace",
    "folded",
    "growing_rows",
    "in_float32",
    "joined_by_layer",
    "joined_within",
    "merge_",
    "one_scale",
    "scaled_change",
    "singular",
    "singular_directions",
    "truncated",
]
