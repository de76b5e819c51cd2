"""The configuration that PEFT saves beside an adapter's weights, read as data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.paths import module_pattern
from anchorlora.store.json import Unreadable, load
from anchorlora.store.seal import content_hash

ADAPTER_FILES = CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # PEFT's names
# initializations of LoRA that also change the base model: without it, the saved factors are another function
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# parts of PEFT's LoRA with which the update is no longer s B A at every token
NO_PRODUCT = (
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "target_parameters"),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config"),
)
MERGE = "merge it into its base with PEFT (merge_and_unload, then save_pretrained), and give that model"


def read_config(folder: Path) -> dict[str, Any]:
    """Read the fields of a saved adapter's configuration."""
    path = folder / CONFIG_FILE
    try:
        config = load(path)
    except (FileNotFoundError, NotADirectoryError):
        inner = [config.parent for config in sorted(folder.glob(f"*/{CONFIG_FILE}"))]
        such = f", such as {inner[0]}" if inner else ""
        raise InvalidValue(f"{path} is missing; give the folder of a saved PEFT adapter{such}") from None
    except Unreadable as error:
        raise InvalidValue(f"{path} is not readable JSON: {error}") from None
    if not isinstance(config, dict) or str(config.get("peft_type")) != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        how = f", but one of kind {kind!r:.40}; where PEFT can, {MERGE}" if kind else ""
        raise InvalidValue(f"{path} does not describe a LoRA adapter{how}")
    if config.get("use_dora"):
        raise InvalidValue(f"{path} describes a DoRA adapter, whose update is not a product s B A; {MERGE}")
    for name in NO_PRODUCT:
        if config.get(name):
            raise InvalidValue(f"{path} sets {name}, so the update is not a product s B A; train a plain LoRA adapter instead")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_THE_BASE):
        raise InvalidValue(
            f"{path}: init_lora_weights is {start!r}, so the factors belong to a changed base; "
            "save them with save_pretrained(path_initial_model_for_weight_conversion=..) first"
        )
    known = config.get("alpha_pattern") or {}
    if not isinstance(known, dict):
        raise InvalidValue(f"{path}: alpha_pattern is {known!r:.40}, not a mapping of layers to numbers")
    for alpha in (config.get("lora_alpha"), *known.values()):
        if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise InvalidValue(f"{path}: lora_alpha is {alpha!r}, not a number")
    _refuse_slow(path, config)
    return {**config, "alpha_pattern": known}


def refuse_replicated(folder: Path) -> None:
    """Refuse an adapter whose layers are copies of the base model's: a number in their path is that of another layer there."""
    if read_config(folder).get("layer_replication"):
        raise InvalidValue(f"{folder / CONFIG_FILE} sets layer_replication, so its layers are not those of the base model; {MERGE}")


def _refuse_slow(path: Path, config: dict[str, Any]) -> None:
    """Refuse regular expressions that would keep whoever reads the configuration busy; `target_modules` is never searched with."""
    for name in ("alpha_pattern", "rank_pattern", "exclude_modules", "layers_pattern"):
        patterns = config.get(name) or []
        for pattern in patterns if isinstance(patterns, (dict, list)) else [patterns]:
            if not isinstance(pattern, str):
                raise InvalidValue(f"{path}: {name} holds {pattern!r:.40}, which names no module")
            try:
                module_pattern(pattern)
            except InvalidValue as error:
                raise InvalidValue(f"{path}: {name}: {error}") from None


def adapter_sha256(folder: Path) -> str:
    """Return one SHA-256 over the two files of a saved adapter."""
    return content_hash(b"".join((folder / name).read_bytes() for name in ADAPTER_FILES))
