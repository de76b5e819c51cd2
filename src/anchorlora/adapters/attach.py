"""Put a saved adapter on a loaded model, as plain PEFT does, without letting PEFT read the files.

Also checks that the adapter's configuration describes the factors beside it: PEFT would make of it exactly what the file holds.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

from anchorlora.adapters.files import fitted, read_with_whole
from anchorlora.adapters.kinds import adapters_at, block_factors
from anchorlora.adapters.layers import lora_layers
from anchorlora.adapters.targets import named, refuse_misfit, split_by_text
from anchorlora.adapters.whole import COME_WITH, ROWS, put_whole, take_off
from anchorlora.devices import forked_generators
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Factors
from anchorlora.paths import at_the_end
from anchorlora.store.adapter_config import CONFIG_FILE, read_config

# the usual targets of a model that PEFT's table does not have: the first of these groups of which it has all
ATTENTION = (("q_proj", "v_proj"), ("query_key_value",), ("qkv_proj",), ("c_attn",), ("Wqkv",))
DEFAULT = "default"  # the name that PEFT gives to a loaded adapter


def attach(model: Any, folder: Path, *, only_text: bool = False) -> PeftModel:
    """Put the adapter of a folder on a model, for inference, or what of it text reaches. The folder is read as data: PEFT receives
    only finite factors and the names of their layers.
    """
    described, whole = read_with_whole(folder)
    _refuse_what_is_followed(folder)
    saved = fitted(described, [name for name, _ in model.named_modules()], where=str(folder))
    refuse_misfit(model, saved, where=str(folder))
    config = read_config(folder)
    refuse_undescribed(described, config, where=folder / CONFIG_FILE, beside=whole.tensors)
    if only_text:
        saved, _ = split_by_text(model, saved, where=str(folder))
    put_whole(model, whole, where=str(folder))
    adapted = _with_blocks(model, saved, where=str(folder)).eval()
    layers = lora_layers(adapted)
    for layer in sorted(set(saved) | set(layers)):
        f, module = saved.get(layer), layers.get(layer)
        made = block_factors(module, DEFAULT) if module is not None and DEFAULT in adapters_at(module) else None
        if f is None or module is None or made is None or (f.A.shape, f.B.shape) != (made.A.shape, made.B.shape):
            raise InvalidValue(
                f"{folder}: PEFT would make something else of {layer} than the file holds; {CONFIG_FILE} and the weights do not fit"
            )
        with torch.no_grad():
            made.A.copy_(f.A)
            made.B.copy_(f.B)
        module.scaling[DEFAULT] = f.scale
    return adapted


def detach(model: Any) -> None:
    """Take all adapters off a base model, whatever put them there; its own weights were never written to."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            model.set_submodule(name, layer.get_base_layer())
    take_off(model)
    if hasattr(model, "peft_config"):  # else PEFT warns of it when the next adapter comes
        del model.peft_config


def usual_targets(model: Any) -> tuple[str, ...] | str:
    """Return the modules that LoRA usually adapts in a model: PEFT's table by architecture, else its attention inputs by name."""
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(getattr(model.config, "model_type", ""))
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    groups = [tuple(known)] if isinstance(known, list) else []
    return next((group for group in (*groups, *ATTENTION) if names.issuperset(group)), "all-linear")


def _with_blocks(model: Any, saved: Mapping[str, Factors], *, where: str) -> PeftModel:
    """The model with an empty adapter of the saved sizes, which does not train."""
    first = next(iter(saved.values())).rank
    ranks = {re.escape(layer): f.rank for layer, f in saved.items() if f.rank != first}
    config = LoraConfig(r=first, rank_pattern=ranks, target_modules=sorted(saved), task_type="CAUSAL_LM", inference_mode=True)
    with warnings.catch_warnings(), forked_generators():  # PEFT draws initial values, and warns of Conv1D, which it then takes
        warnings.simplefilter("ignore")
        try:
            return get_peft_model(model, config, adapter_name=DEFAULT)
        except ValueError as error:
            raise InvalidValue(f"{where}: PEFT cannot put it on this model: {' '.join(str(error).split()):.200}") from None


def _refuse_what_is_followed(folder: Path) -> None:
    """Refuse fields by which PEFT would import a module, and fields that name no modules."""
    path, config = folder / CONFIG_FILE, read_config(folder)
    if config.get("megatron_config"):
        raise InvalidValue(f"{path} has megatron_config, which names code to import; remove it")
    mapping = config.get("auto_mapping")  # PEFT writes a class of transformers for an adapter without a task
    library = mapping.get("parent_library") if isinstance(mapping, dict) else mapping
    if library and str(library).split(".")[0] != "transformers":
        raise InvalidValue(f"{path}: auto_mapping names a library to import that is not transformers; remove it")
    for name in ("target_modules", "exclude_modules"):
        names = config.get(name) or []
        if not isinstance(names, str) and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
            raise InvalidValue(f"{path}: {name} is {names!r:.40}, no list of module names; list them by name")
    if not isinstance(config.get("rank_pattern") or {}, dict):
        raise InvalidValue(f"{path}: rank_pattern is no mapping of layers to ranks")


# with these, the model is more than its base and plain LoRA factors on its layers
MORE_THAN_FACTORS = ("layer_replication", *COME_WITH)


def refuse_undescribed(
    saved: Mapping[str, Factors], config: Mapping[str, Any], *, where: Path, beside: Collection[str] = ()
) -> None:
    """Raise where the configuration would give a layer no adapter, or one of another rank than the weights hold."""
    come = {COME_WITH[name.endswith(ROWS)] for name in beside}
    for name in MORE_THAN_FACTORS:
        if config.get(name) and name not in come:
            raise InvalidValue(f"{where} sets {name}, but the weights hold nothing for it; train a plain LoRA adapter instead")
    for layer, f in saved.items():
        if field := _leaves_out(layer, config):
            raise InvalidValue(f"{where}: {field} leaves out {layer}, whose factors the weights hold; they do not fit")
        field, rank = _rank(layer, config)
        if type(rank) is not int or rank != f.rank:
            raise InvalidValue(f"{where}: {field} is {rank!r:.40} for {layer}, but the weights hold rank {f.rank}; they do not fit")


def _leaves_out(layer: str, config: Mapping[str, Any]) -> str | None:
    """The field that keeps PEFT from adapting a layer."""
    excluded, targets = config.get("exclude_modules"), config.get("target_modules")
    if re.fullmatch(excluded, layer) if isinstance(excluded, str) else named(layer, excluded or ()):
        return "exclude_modules"
    if targets is None or isinstance(targets, str) or layer in targets:
        return None
    if not named(layer, targets):
        return "target_modules"
    return None if _of_these_numbers(layer, config) else "layers_to_transform"


def _of_these_numbers(layer: str, config: Mapping[str, Any]) -> bool:
    """True if the number in a layer's path is in layers_to_transform, or none are given."""
    numbers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if numbers is None or numbers == []:
        return True
    names = [patterns] if isinstance(patterns, str) else patterns
    matches = [re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", layer) for name in names or [r"[^.]*"]]
    own = next((match[match.lastindex or 0] for match in matches if match), None)
    return own in {str(n) for n in (numbers if isinstance(numbers, list) else [numbers]) if type(n) is int}


def _rank(layer: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """The field that gives a layer's rank, and its value."""
    for name, rank in (config.get("rank_pattern") or {}).items():
        if at_the_end(layer, name):
            return "rank_pattern", rank
    return "r", config.get("r", 8)  # PEFT's own default
