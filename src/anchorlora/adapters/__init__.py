"""LoRA adapters, by way of PEFT.  The only package that imports peft; the rest of the library sees adapted layers."""

from anchorlora.adapters.anchor import Anchor as Anchor
from anchorlora.adapters.anchor import WeightAnchor as WeightAnchor
from anchorlora.adapters.attach import attach as attach
from anchorlora.adapters.attach import detach as detach
from anchorlora.adapters.attach import usual_targets as usual_targets
from anchorlora.adapters.files import read_adapter as read_adapter
from anchorlora.adapters.files import write_adapter as write_adapter
from anchorlora.adapters.gates import Gated as Gated
from anchorlora.adapters.gates import Gates as Gates
from anchorlora.adapters.gates import LayerGates as LayerGates
from anchorlora.adapters.kinds import LAYER_KINDS as LAYER_KINDS
from anchorlora.adapters.kinds import LayerKind as LayerKind
from anchorlora.adapters.layers import NOTHING as NOTHING
from anchorlora.adapters.layers import AdaptedLayer as AdaptedLayer
from anchorlora.adapters.layers import lora_layers as lora_layers
from anchorlora.adapters.merging import merge as merge
from anchorlora.adapters.merging import mergeable as mergeable
from anchorlora.adapters.merging import merged_factors as merged_factors
from anchorlora.adapters.merging import realized_weights as realized_weights
from anchorlora.adapters.stack import AdapterStack as AdapterStack
from anchorlora.adapters.stack import activate as activate
from anchorlora.adapters.targets import keep_unpacked as keep_unpacked
from anchorlora.adapters.targets import refuse_misfit as refuse_misfit
from anchorlora.adapters.targets import target_layers as target_layers
