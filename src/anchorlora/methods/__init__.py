"""Methods as values: a plan for adapters, constraints, and what the method preserves.  `catalog` has those of the table."""

from anchorlora.methods import catalog
from anchorlora.methods.adapter_plan import AdapterPlan, Boundary
from anchorlora.methods.base import Method, MethodTable
from anchorlora.methods.entry import read_entries
from anchorlora.methods.folded import FoldedPerTask
from anchorlora.methods.gated import GatedPerTask
from anchorlora.methods.merged import MergedPerTask
from anchorlora.methods.plans import PerTask, Shared
from anchorlora.methods.preserves import Preserves

_entries = read_entries()
METHODS = MethodTable({name: _entries[name].of(method) for name, method in MethodTable.of(catalog).items()})

__all__ = [
    "METHODS",
    "AdapterPlan",
    "Boundary",
    "FoldedPerTask",
    "GatedPerTask",
    "MergedPerTask",
    "Method",
    "MethodTable",
    "PerTask",
    "Preserves",
    "Shared",
]
