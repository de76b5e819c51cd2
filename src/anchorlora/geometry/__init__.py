"""Linear algebra of protected subspaces and thin products.  Imports only torch and can be used alone."""

from anchorlora.geometry.low_rank import Factors, Product, singular, truncated
from anchorlora.geometry.rounding import Rounding, merge_
from anchorlora.geometry.spectrum import KEPT, GrowingRows, Spectrum
from anchorlora.geometry.subspace import Subspace, in_float32, joined_by_layer, singular_directions

__all__ = [
    "KEPT",
    "Factors",
    "GrowingRows",
    "Product",
    "Rounding",
    "Spectrum",
    "Subspace",
    "in_float32",
    "joined_by_layer",
    "merge_",
    "singular",
    "singular_directions",
    "truncated",
]
