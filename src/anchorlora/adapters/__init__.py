"""LoRA blocks as PEFT adapters.  The only package that imports peft; elsewhere there are sites."""

from anchorlora.adapters.attach import attach
from anchorlora.adapters.files import CONFIG_FILE, WEIGHTS_FILE, read_adapter, read_config, write_adapter
from anchorlora.adapters.gates import Gated, Gates
from anchorlora.adapters.layers import NOTHING, Scope, Site, lora_layers
from anchorlora.adapters.merging import merge, mergeable, realised_weights
from anchorlora.adapters.stack import Blocks, activate
from anchorlora.adapters.targets import keep_unpacked, target_layers
from anchorlora.storage.tensors import write_tensors

__all__ = [
    "CONFIG_FILE",
    "NOTHING",
    "WEIGHTS_FILE",
    "Blocks",
    "Gated",
    "Gates",
    "Scope",
    "Site",
    "activate",
    "attach",
    "keep_unpacked",
    "lora_layers",
    "merge",
    "mergeable",
    "read_adapter",
    "read_config",
    "realised_weights",
    "target_layers",
    "write_adapter",
    "write_tensors",
]
