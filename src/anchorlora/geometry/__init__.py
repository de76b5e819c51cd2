"""Linear algebra of protected directions and thin products.  Imports torch only and can be used alone."""

from anchorlora.geometry.factors import Factors
from anchorlora.geometry.precision import true_precision
from anchorlora.geometry.product import Product
from anchorlora.geometry.rounding import Rounding, merge_
from anchorlora.geometry.singular import singular_directions
from anchorlora.geometry.spectrum import KEPT, GrowingRows, Spectrum
from anchorlora.geometry.subspace import Subspace
from anchorlora.geometry.truncation import singular, truncated

__all__ = [
    "KEPT",
    "Factors",
    "GrowingRows",
    "Product",
    "Rounding",
    "Spectrum",
    "Subspace",
    "merge_",
    "singular",
    "singular_directions",
    "true_precision",
    "truncated",
]
