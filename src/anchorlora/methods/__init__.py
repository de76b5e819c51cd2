"""Methods as values: a plan for adapters, constraints, and what the method preserves.  A new one is a line in `catalog`."""

from anchorlora.methods import catalog
from anchorlora.methods.adapter_plan import AdapterPlan, TaskEnd
from anchorlora.methods.base import Method, MethodTable
from anchorlora.methods.folded import FoldedPerTask
from anchorlora.methods.gated import GatedPerTask
from anchorlora.methods.merged import MergedPerTask
from anchorlora.methods.plans import PerTask, Shared
from anchorlora.methods.preserves import Preserves

METHODS = MethodTable.of(catalog)

__all__ = [
    "METHODS",
    "AdapterPlan",
    "FoldedPerTask",
    "GatedPerTask",
    "MergedPerTask",
    "Method",
    "MethodTable",
    "PerTask",
    "Preserves",
    "Shared",
    "TaskEnd",
]
