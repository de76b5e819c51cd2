"""Adapters on disk: written as one ordinary PEFT LoRA adapter, read as data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anchorlora.geometry import Factors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder: Path, factors: Mapping[str, Factors], *, base: str) -> None:
    """Factors as one ordinary PEFT LoRA adapter: float32, plain scaling, alpha = scale x rank.  `folder` must not exist."""
    folder.mkdir(parents=True)
    first = next(iter(factors.values()))
    alpha = first.scale * first.rank
    LoraConfig(
        r=first.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # PEFT only divides by r
        lora_dropout=0.0,
        target_modules=sorted(factors),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).save_pretrained(str(folder))
    config = folder / CONFIG_FILE
    fields = json.loads(config.read_text())
    fields["target_modules"] = sorted(factors)  # PEFT holds a set: its order would differ from process to process
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    tensors = {}
    for layer, f in factors.items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = f.A.detach().float().cpu().contiguous()
        tensors[f"base_model.model.{layer}.lora_B.weight"] = f.B.detach().float().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def read_adapter(folder: Path) -> dict[str, Factors]:
    """The factors of a saved PEFT LoRA adapter by layer, read as data: safetensors and JSON, no model, no code.

    Raises ValueError that names the file for anything that is not a plain LoRA adapter with finite factors.
    """
    config = _read_config(folder / CONFIG_FILE)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ValueError(f"{weights} is missing; save the adapter with save_pretrained(safe_serialization=True)")
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(weights, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # a file handle, not a dict
                match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
                if match is None:
                    raise ValueError(f"{weights} holds {key}, which is no factor of a plain LoRA block on linear layers")
                halves.setdefault(match[1], {})[match[2]] = file.get_tensor(key)
    except SafetensorError as error:
        raise ValueError(f"{weights} is not a readable safetensors file: {error}") from None
    if not halves:
        raise ValueError(f"{weights} holds no LoRA factors")
    out = {}
    for layer, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{weights} holds only one factor of {layer}")
        if not all(bool(torch.isfinite(x).all()) for x in pair.values()):
            raise ValueError(f"{weights}: the factors of {layer} hold NaN or infinite values")
        rank = pair["A"].shape[0]
        alpha = _alpha(config, layer)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        try:
            out[layer] = Factors(pair["A"], pair["B"], scale)
        except ValueError as error:
            raise ValueError(f"{weights}: {layer}: {error}") from None
    return out


def _alpha(config: dict[str, Any], layer: str) -> float:
    """A layer's alpha: PEFT lets `alpha_pattern` name layers by the end of their path."""
    for name, alpha in config["alpha_pattern"].items():
        if layer == name or layer.endswith("." + name):
            return float(alpha)
    return float(config["lora_alpha"])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give the folder of a saved PEFT adapter") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(config, dict) or str(config.get("peft_type")) != "LORA":
        raise ValueError(f"{path} describes no LoRA adapter")
    if config.get("use_dora"):
        raise ValueError(f"{path} describes a DoRA adapter, whose update is no product s B A")
    if not isinstance(config.get("lora_alpha"), (int, float)):
        raise ValueError(f"{path}: lora_alpha is {config.get('lora_alpha')!r}, not a number")
    known = config.get("alpha_pattern") or {}
    if not isinstance(known, dict) or not all(re.fullmatch(r"[\w.]+", str(key)) for key in known):
        raise ValueError(f"{path}: alpha_pattern holds regular expressions, which are not followed; list layers by full path")
    return {**config, "alpha_pattern": known}
