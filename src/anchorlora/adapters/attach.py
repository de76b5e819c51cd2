"""A saved adapter on a loaded model, as plain PEFT puts it there, without PEFT having read a word of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from anchorlora.adapters.described import refuse_undescribed
from anchorlora.adapters.files import CONFIG_FILE, read_adapter, read_config
from anchorlora.adapters.sites import lora_layers
from anchorlora.adapters.targets import refuse_misfit
from anchorlora.devices import forked_generators
from anchorlora.geometry import Factors

BLOCK = "default"  # what PEFT calls a block that is loaded


def attach(model: Any, folder: Path) -> PeftModel:
    """The model with the adapter of `folder` on it.  The model itself is changed; nothing of it trains.

    The folder is read as data, and PEFT is given nothing of it but finite factors and the names of their layers. Raises ValueError
    for what is no plain LoRA adapter in safetensors, whose configuration describes other factors, or that belongs to another model.
    """
    saved = read_adapter(folder)
    _refuse_what_is_followed(folder)
    refuse_misfit(model, saved, where=str(folder))
    refuse_undescribed(saved, read_config(folder), where=folder / CONFIG_FILE)
    adapted = _with_blocks(model, saved, where=str(folder)).eval()
    layers = lora_layers(adapted)
    for layer in sorted(set(saved) | set(layers)):
        if layer not in saved or not _fits(saved[layer], layers.get(layer)):
            raise ValueError(f"{folder}: PEFT does not put on {layer} what the file holds; {CONFIG_FILE} and weights do not fit")
        _fill(layers[layer], saved[layer])
    return adapted


def _with_blocks(model: Any, saved: Mapping[str, Factors], *, where: str) -> PeftModel:
    """The model with an empty block for each of the saved ones, which does not train."""
    first = next(iter(saved.values())).rank
    ranks = {re.escape(layer): f.rank for layer, f in saved.items() if f.rank != first}
    config = LoraConfig(r=first, rank_pattern=ranks, target_modules=sorted(saved), task_type="CAUSAL_LM", inference_mode=True)
    with warnings.catch_warnings(), forked_generators():  # PEFT draws start values, and tells of GPT-2's transposed layers
        warnings.simplefilter("ignore")
        try:
            return get_peft_model(model, config, adapter_name=BLOCK)
        except ValueError as error:
            raise ValueError(f"{where}: PEFT cannot put it on this model: {' '.join(str(error).split()):.200}") from None


def _fits(f: Factors, module: LoraLayer | None) -> bool:
    """Whether a layer has an empty block of this size; embeddings have another kind."""
    if module is None or BLOCK not in module.lora_A:
        return False
    return f.A.shape == module.lora_A[BLOCK].weight.shape and f.B.shape == module.lora_B[BLOCK].weight.shape


def _fill(module: LoraLayer, f: Factors) -> None:
    with torch.no_grad():
        module.lora_A[BLOCK].weight.copy_(f.A)
        module.lora_B[BLOCK].weight.copy_(f.B)
    module.scaling[BLOCK] = f.scale


def _refuse_what_is_followed(folder: Path) -> None:
    """Fields that PEFT would import a module by, or would search the model with as a regular expression of anybody's making."""
    path, config = folder / CONFIG_FILE, read_config(folder)
    if config.get("megatron_config"):
        raise ValueError(f"{path} has megatron_config, which names code to import; take it out")
    if not _of_transformers(config.get("auto_mapping")):
        raise ValueError(f"{path}: auto_mapping names a library that is not transformers, to import it; take it out")
    for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "target_parameters"):
        if not _plain_names(config.get(name)):
            raise ValueError(f"{path}: {name} is a regular expression, which is not followed; list the modules by their names")
    ranks = config.get("rank_pattern") or {}
    if not isinstance(ranks, dict) or not _plain_names(list(ranks)):
        raise ValueError(f"{path}: rank_pattern holds regular expressions, which are not followed; list layers by full path")


def _of_transformers(mapping: Any) -> bool:
    """Whether this is nothing, or what PEFT writes for an adapter without a task: a class of transformers."""
    library = mapping.get("parent_library") if isinstance(mapping, dict) else mapping
    return not mapping or library is None or (isinstance(library, str) and library.split(".")[0] == "transformers")


def _plain_names(names: Any) -> bool:
    """Whether this is nothing, or a list of names of modules, or the word for all of them."""
    if isinstance(names, str):
        return names == "all-linear"
    return not names or (isinstance(names, list) and all(isinstance(n, str) and re.fullmatch(r"[\w.]+", n) for n in names))
