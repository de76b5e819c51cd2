"""LoRA blocks as PEFT adapters.  The only package that imports peft; elsewhere there are sites."""

from anchorlora.adapters.attach import attach
from anchorlora.adapters.blocks import Blocks
from anchorlora.adapters.files import read_adapter, write_adapter
from anchorlora.adapters.sites import NOTHING, Scope, Site, lora_layers

__all__ = ["NOTHING", "Blocks", "Scope", "Site", "attach", "lora_layers", "read_adapter", "write_adapter"]
