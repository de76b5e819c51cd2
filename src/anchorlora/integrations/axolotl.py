"""Protection in axolotl.

plugins: [anchorlora.integrations.axolotl.ProtectionPlugin]
anchorlora_cores: old-cores.safetensors
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from anchorlora.errors import InvalidValue, MissingExtra
from anchorlora.features import read_cores
from anchorlora.integrations.trainer import ProtectionCallback

try:
    from axolotl.integrations.base import BasePlugin
except ImportError:

    class BasePlugin:  # type: ignore[no-redef]  # stands in, so that this module can be read without axolotl
        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise MissingExtra("ProtectionPlugin is a plugin of axolotl: pip install axolotl")


class ProtectionArgs(BaseModel):
    """The fields that the plugin adds to axolotl's YAML file."""

    anchorlora_cores: str | None = None  # file of cores, as `anchorlora cores` writes it
    anchorlora_also_training: list[str] = []  # modules that train without protection, such as "lm_head"


class ProtectionPlugin(BasePlugin):
    """Protects the adapter that axolotl trains, by the constraints of the anchor at hand."""

    def get_input_args(self) -> str:
        """Name the class of the fields that the plugin adds."""
        return f"{__name__}.{ProtectionArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback that the trainer is made with."""
        if not cfg.get("anchorlora_cores"):
            raise InvalidValue(
                "anchorlora_cores is not set, so nothing would be protected; anchorlora cores makes the file of text"
            )
        also = cfg.get("anchorlora_also_training") or ()
        return [ProtectionCallback(cores=read_cores(cfg["anchorlora_cores"]), also_training=also)]
