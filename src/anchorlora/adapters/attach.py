"""A saved adapter on a loaded model, as plain PEFT puts it there, and checked against the file."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from anchorlora.adapters.files import CONFIG_FILE, read_adapter, read_config
from anchorlora.adapters.sites import Scope, lora_layers
from anchorlora.adapters.targets import refuse_misfit


def attach(model: Any, folder: Path) -> PeftModel:
    """The model with the adapter of `folder` on it.  The model itself is changed; nothing of it trains.

    The folder is read as data first, so what PEFT then loads is a plain LoRA adapter in safetensors with finite factors. Raises
    ValueError for one that is none, or that belongs to another model.
    """
    saved = read_adapter(folder)
    _refuse_what_is_followed(folder)
    refuse_misfit(model, saved, where=str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's own use of transformers
        adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    live = {site.layer: site.current for site in Scope.of(adapted).sites} if lora_layers(adapted) else {}
    for layer, f in saved.items():
        if layer not in live or not _equal(f, live[layer]):
            raise ValueError(f"{folder}: PEFT does not put on {layer} what the file holds; {CONFIG_FILE} and weights do not fit")
    return adapted


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


def _equal(saved: Any, live: Any) -> bool:
    same = all(torch.equal(a.float(), b.detach().float().cpu()) for a, b in ((saved.A, live.A), (saved.B, live.B)))
    return same and abs(saved.scale - live.scale) <= 1e-6 * abs(saved.scale)
