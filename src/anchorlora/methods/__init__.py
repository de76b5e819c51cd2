"""Methods as values: a plan for adapters, constraints, and what the method preserves.  A new one is a line in `catalog`."""

from anchorlora.methods import catalog
from anchorlora.methods.adapter_plan import AdapterPlan as AdapterPlan
from anchorlora.methods.adapter_plan import TaskEnd as TaskEnd
from anchorlora.methods.base import Method as Method
from anchorlora.methods.base import MethodTable as MethodTable
from anchorlora.methods.folded import FoldedPerTask as FoldedPerTask
from anchorlora.methods.gated import GatedPerTask as GatedPerTask
from anchorlora.methods.merged import MergedPerTask as MergedPerTask
from anchorlora.methods.plans import PerTask as PerTask
from anchorlora.methods.plans import Shared as Shared
from anchorlora.methods.preserves import Preserves as Preserves

METHODS = MethodTable.of(catalog)
