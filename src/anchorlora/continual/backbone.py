"""The frozen language model and its tokenizer, loaded from a folder or a hub name, as data only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from anchorlora.continual.recipe import Backbone as BackboneSettings
from anchorlora.tasks.files import nearest_folders

WEIGHTS = "*.safetensors"


@dataclass(frozen=True, eq=False)
class Backbone:
    """A loaded model with what a record says of it."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    revision: str | None
    sha256: str | None  # over the hashes of its safetensors, configuration and tokenizer files
    dtype: str
    device: torch.device
    parameters: int  # of the model alone, before any adapter

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "revision": self.revision,
            "sha256": self.sha256,
            "parameters": self.parameters,
            "dtype": self.dtype,
        }


def load_backbone(settings: BackboneSettings, *, folder: Path | None = None) -> Backbone:
    """The model of the settings; `folder`: where an embedded one lies.  No remote code, no pickle.

    Raises ValueError that names the model for anything that cannot be loaded.
    """
    if settings.model is None:
        raise ValueError("this recipe names no model; give one with --model")
    place: str | Path = folder or settings.model
    if folder is None and _looks_like_path(settings.model):
        place = Path(settings.model).expanduser()
        if not (place / "config.json").is_file():
            raise ValueError(f"no model at {settings.model}: it has no config.json{nearest_folders(place)}")
    device, dtype = device_of(settings), dtype_of(settings)
    load = {"revision": settings.revision, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, padding_side="left", **load)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, use_safetensors=True, **load)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the model {settings.model} cannot be loaded: {reason}") from None
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    # the model's own generation settings (sampling, penalties, further stop tokens) would otherwise fill in what we leave open
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad)
    model.eval().to(device)
    commit = getattr(model.config, "_commit_hash", None) if not isinstance(place, Path) else None
    sha256 = _fingerprint(Path(model.name_or_path)) if isinstance(place, Path) else commit
    revision = commit or settings.revision
    parameters = sum(p.numel() for p in model.parameters())
    return Backbone(model, tokenizer, settings.model, revision, sha256, str(dtype).removeprefix("torch."), device, parameters)


def _looks_like_path(name: str) -> bool:
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") > 1


def device_of(settings: BackboneSettings) -> torch.device:
    """Where the model goes; "auto" is the first GPU if there is one."""
    if settings.device != "auto":
        return torch.device(settings.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(settings: BackboneSettings) -> torch.dtype:
    """The precision of the frozen weights; "auto" is bfloat16 on a GPU that has it, else float32."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.bfloat16 if device_of(settings).type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def _fingerprint(folder: Path) -> str:
    """SHA-256 over name and SHA-256 of each weight, configuration and tokenizer file, sorted by name."""
    total = hashlib.sha256()
    for path in sorted(p for pattern in (WEIGHTS, "*.json", "*.model", "*.txt") for p in folder.glob(pattern)):
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
