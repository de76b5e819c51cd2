"""A saved adapter on a loaded model, as plain PEFT puts it there, and checked against the file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from anchorlora.adapters.files import CONFIG_FILE, read_adapter
from anchorlora.adapters.sites import Scope, lora_layers


def attach(model: Any, folder: Path) -> PeftModel:
    """The model with the adapter of `folder` on it.  The model itself is changed; nothing of it trains.

    The folder is read as data first, so what PEFT then loads is a plain LoRA adapter in safetensors with finite factors. Raises
    ValueError for one that is none, or that belongs to another model.
    """
    saved = read_adapter(folder)
    _refuse_what_imports(folder / CONFIG_FILE)
    widths = {name: _shape(m) for name, m in model.named_modules() if getattr(m, "weight", None) is not None}
    for layer, f in saved.items():
        shape = f.B.shape[0], f.A.shape[1]
        if layer not in widths:
            raise ValueError(f"{folder} adapts {layer}, which the model has not; the adapter belongs to another model")
        if widths[layer] not in (shape, shape[::-1]):  # GPT-2's layers hold the transpose
            raise ValueError(f"{folder} adapts {layer} as {shape}, but it is {widths[layer]}; the adapter belongs to another model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT's own use of transformers
        adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    live = {site.layer: site.current for site in Scope.of(adapted).sites} if lora_layers(adapted) else {}
    for layer, f in saved.items():
        if layer not in live or not _equal(f, live[layer]):
            raise ValueError(f"{folder}: PEFT does not put on {layer} what the file holds; {CONFIG_FILE} and weights do not fit")
    return adapted


def _shape(module: Any) -> tuple[int, ...]:
    """(d_out, d_in) of a linear layer, whose quantised weight may be packed into another shape."""
    return (module.out_features, module.in_features) if isinstance(module, nn.Linear) else tuple(module.weight.shape)


def _refuse_what_imports(path: Path) -> None:
    """A field of the configuration that names a Python module to import is not followed."""
    if json.loads(path.read_text()).get("megatron_config"):
        raise ValueError(f"{path} has megatron_config, which names code to import; take it out")


def _equal(saved: Any, live: Any) -> bool:
    same = all(torch.equal(a.float(), b.detach().float().cpu()) for a, b in ((saved.A, live.A), (saved.B, live.B)))
    return same and abs(saved.scale - live.scale) <= 1e-6 * abs(saved.scale)
