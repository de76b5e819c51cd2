"""Methods as values.  A new one is a line in one of these modules, or a module of its own named below; and a row of claims."""

from anchorlora.methods import catalog
from anchorlora.methods.base import CLAIMS, AdapterPlan, Claims, Method, MethodTable, PerTask, Shared
from anchorlora.methods.gated import GatedPerTask

METHODS = MethodTable.of(catalog)

__all__ = ["CLAIMS", "METHODS", "AdapterPlan", "Claims", "GatedPerTask", "Method", "MethodTable", "PerTask", "Shared"]
