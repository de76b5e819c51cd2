"""LoRA adapters, by way of PEFT.  The only package that imports peft; the rest of the library sees adapted layers."""

from anchorlora.adapters.anchor import Anchor, WeightAnchor
from anchorlora.adapters.attach import attach, detach, usual_targets
from anchorlora.adapters.files import read_adapter, write_adapter
from anchorlora.adapters.gates import Gated, Gates
from anchorlora.adapters.kinds import LAYER_KINDS, LayerKind
from anchorlora.adapters.layers import NOTHING, AdaptedLayer, lora_layers
from anchorlora.adapters.merging import merge, mergeable, merged_factors, realized_weights
from anchorlora.adapters.stack import AdapterStack, activate
from anchorlora.adapters.targets import keep_unpacked, refuse_misfit, target_layers

__all__ = [
    "LAYER_KINDS",
    "NOTHING",
    "AdaptedLayer",
    "AdapterStack",
    "Anchor",
    "Gated",
    "Gates",
    "LayerKind",
    "WeightAnchor",
    "activate",
    "attach",
    "detach",
    "keep_unpacked",
    "lora_layers",
    "merge",
    "mergeable",
    "merged_factors",
    "read_adapter",
    "realized_weights",
    "refuse_misfit",
    "target_layers",
    "usual_targets",
    "write_adapter",
]
