"""Methods as values.  A new one is a line in one of these modules, or a module of its own named below; and a row of claims."""

from anchorlora.methods import cumulative, shared
from anchorlora.methods.base import BlockPlan, Method, MethodTable, PerTask, Shared
from anchorlora.methods.claims import CLAIMS, Claims

METHODS = MethodTable.of(shared, cumulative)

__all__ = ["CLAIMS", "METHODS", "BlockPlan", "Claims", "Method", "MethodTable", "PerTask", "Shared"]
