"""Methods as values.  A new one is a line in one of these modules, or a module of its own named below; and a row of claims."""

from anchorlora.methods import cumulative, shared
from anchorlora.methods.base import BlockPlan, Method, MethodTable, PerTask, Shared
from anchorlora.methods.claims import CLAIMS, Claims
from anchorlora.methods.gated import GatedPerTask

METHODS = MethodTable.of(shared, cumulative)

__all__ = ["CLAIMS", "METHODS", "BlockPlan", "Claims", "GatedPerTask", "Method", "MethodTable", "PerTask", "Shared"]
