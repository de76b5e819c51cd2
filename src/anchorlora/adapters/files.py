"""Saved adapters: written as one ordinary PEFT LoRA adapter, read as data."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn

from anchorlora.adapters.whole import COME_WITH, NO_WHOLE, WholeWeights, comes_with
from anchorlora.errors import InvalidValue, NotFinite
from anchorlora.geometry import Factors
from anchorlora.paths import at_the_end
from anchorlora.store.adapter_config import CONFIG_FILE, MERGE, WEIGHTS_FILE, read_config
from anchorlora.store.json import converting
from anchorlora.store.tensors import PEFTS, opened_tensors, write_tensors

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # of torch.compile, FSDP and checkpointing
Saved = TypeVar("Saved")
LARGEST = torch.finfo(torch.float32).max


class HistoryConfig(LoraConfig):
    """The configuration of a frozen history beside the block that trains; PEFT saves adapters apart, and warns of nothing."""

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save it, with a warning outside a checkpoint, whose parts are loaded one by one."""
        super().save_pretrained(save_directory, **kwargs)
        if not any(folder.name.startswith("checkpoint-") for folder in (Path(save_directory), Path(save_directory).parent)):
            warnings.warn(
                "save_pretrained writes the new block and its history apart, and PeftModel.from_pretrained loads the block alone; "
                "AdapterStack.save writes both as one adapter",
                stacklevel=3,
            )


def name_history(model: nn.Module, adapter: str) -> None:
    """Let a model say that it saves an adapter, the history of another one, apart from that."""
    for part in model.modules():
        if isinstance(part, PeftModel):
            part.peft_config[adapter].__class__ = HistoryConfig


def write_adapter(
    folder: Path,
    factors: Mapping[str, Factors],
    *,
    base: str | None,
    targets: Iterable[str] | None = None,
    dtype: torch.dtype = torch.float32,
    fan_in_fan_out: bool = False,
    whole: WholeWeights = NO_WHOLE,
) -> None:
    """Write factors as one ordinary PEFT LoRA adapter: plain scaling, alpha = scale x rank; `whole` is what comes with it. Layers
    whose rank or scale differs from the first one's are named in rank_pattern and alpha_pattern.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InvalidValue(f"{folder} is not empty; an adapter is written once")
    factors = {**factors, **whole.unread}
    first, names = next(iter(factors.values())), sorted(factors if targets is None else targets)
    LoraConfig(
        r=first.rank,
        lora_alpha=_alpha_of(first),
        rank_pattern={layer: f.rank for layer, f in factors.items() if f.rank != first.rank},
        alpha_pattern={layer: _alpha_of(f) for layer, f in factors.items() if _alpha_of(f) != _alpha_of(first)},
        lora_dropout=0.0,
        target_modules=names,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        fan_in_fan_out=fan_in_fan_out,
        inference_mode=True,
        **whole.named,
    ).save_pretrained(str(folder))
    config = folder / CONFIG_FILE
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["target_modules"] = names  # PEFT holds a set: its order would differ from process to process
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", newline="\n")
    tensors = {f"{PEFTS}{name}": tensor.cpu().contiguous() for name, tensor in whole.tensors.items()}
    for layer, f in factors.items():
        halves = (("A", f.A), ("B", f.B))
        tensors |= {f"{PEFTS}{layer}.lora_{name}.weight": t.detach().to("cpu", dtype).contiguous() for name, t in halves}
    write_tensors(folder / WEIGHTS_FILE, tensors, metadata={"format": "pt"})


def read_adapter(folder: Path, *, beside: dict[str, Tensor] | None = None) -> dict[str, Factors]:
    """Read the factors of a saved PEFT LoRA adapter as data: safetensors and JSON, no model, no code. Whole weights that come with
    it are put into `beside`; whoever gives none has no use for them, and they are refused.
    """
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise InvalidValue(f"{path} is missing; {_remedy(folder)}")
    halves: dict[str, dict[str, Tensor]] = {}
    stored: dict[str, str] = {}
    with opened_tensors(path) as file:
        for key in file.keys():  # noqa: SIM118  # a file handle, not a dict
            match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", key)
            layer = layer_path(match[1]) if match else None
            whole = layer_path(key) if match is None else None
            if whole is not None and comes_with(whole, config):
                if beside is None:
                    raise InvalidValue(
                        f"{path} holds {key}, a whole weight beside the factors ({' or '.join(COME_WITH)}); give a dict as "
                        "`beside` to take it too"
                    )
                beside[whole] = file.get_tensor(key).clone()  # else it keeps the file mapped
                if not bool(torch.isfinite(beside[whole]).all()):
                    raise NotFinite(f"{path}: {whole} holds NaN or infinite values")
                continue
            if match is None or layer is None:
                spare = key.endswith(".base_layer.weight") and not any("lora_embedding" in name for name in file.keys())  # noqa: SIM118
                remedy = "save the adapter with save_embedding_layers=False" if spare else MERGE
                raise InvalidValue(f"{path} holds {key}, which is not a factor of a plain LoRA adapter on linear layers; {remedy}")
            if stored.setdefault(layer, match[1]) != match[1]:
                raise InvalidValue(f"{path} holds {layer} twice, as {stored[layer]} and as {match[1]}; save the adapter again")
            halves.setdefault(layer, {})[match[2]] = file.get_tensor(key).clone()
    if not halves:
        raise InvalidValue(f"{path} holds no LoRA factors")
    out = {}
    for layer, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise InvalidValue(f"{path} holds only one factor of {layer}")
        if not all(x.is_floating_point() and x.dtype.itemsize > 1 for x in pair.values()):
            raise InvalidValue(f"{path}: the factors of {layer} are stored in {pair['A'].dtype}, not as floats of 16 bits or more")
        if not all(bool(torch.isfinite(x).all()) for x in pair.values()):
            raise NotFinite(f"{path}: the factors of {layer} hold NaN or infinite values")
        if any(x.ndim != 2 or x.numel() == 0 for x in pair.values()):
            raise InvalidValue(f"{path}: the factors of {layer} are not matrices: A {[*pair['A'].shape]}, B {[*pair['B'].shape]}")
        rank = pair["A"].shape[0]
        alpha = _alpha(config, stored[layer].removeprefix(PEFTS))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        try:
            out[layer] = Factors(pair["A"], pair["B"], scale)
        except ValueError as error:
            raise InvalidValue(f"{path}: {layer}: {error}") from None
        _refuse_too_large(out[layer], layer, folder)
    return out


def read_with_whole(folder: Path) -> tuple[dict[str, Factors], WholeWeights]:
    """Read a saved adapter with the whole weights that come with it, as data."""
    beside: dict[str, Tensor] = {}
    factors = read_adapter(folder, beside=beside)
    return factors, WholeWeights.of(beside, read_config(folder))


def layer_path(key: str) -> str | None:
    """Return the path of a layer in the base model by its name in a file, whatever wrapped it; None without PEFT's prefix."""
    for wrapper in WRAPPERS:
        key = key.replace(wrapper, "")
    path = re.sub(rf"^(module\.|{re.escape(PEFTS)})*", "", key)  # PEFT may have wrapped twice, DDP the one or the other
    return path if PEFTS in key.removesuffix(path) else None


def fitted(saved: Mapping[str, Saved], modules: Collection[str], *, where: str) -> Mapping[str, Saved]:
    """Return saved factors under the layer paths of a model, whose prefix may be another than the adapter's. A text model that was
    trained inside a larger one has other paths there (`model.language_model.layers` for `model.layers`).
    """
    known = set(modules)
    if (strange := next((layer for layer in saved if layer not in known), None)) is None:
        return saved
    by_prefix = {}
    for old, new in _prefixes(strange, known):
        names = {layer: new + layer.removeprefix(old) for layer in saved if layer.startswith(old)}
        if len(names) == len(saved) and known.issuperset(names.values()):
            by_prefix[old, new] = names
    if len(by_prefix) != 1:
        fits = f"{len(by_prefix)} prefixes would fit" if by_prefix else "the adapter belongs to another model"
        raise InvalidValue(f"{where} adapts {strange}, which the model does not have; {fits}")
    (names,) = by_prefix.values()
    return {names[layer]: f for layer, f in saved.items()}


def _prefixes(layer: str, known: Collection[str]) -> list[tuple[str, str]]:
    """The prefixes of a layer that could stand for others: where the longest common end of its path and a module's begins."""
    parts = layer.split(".")
    for cut in range(1, len(parts)):
        end = ".".join(parts[cut:])
        news = [name.removesuffix(end) for name in known if name == end or name.endswith(f".{end}")]
        if news and any(part.isdecimal() for part in parts[cut:]):
            return [(layer.removesuffix(end), new) for new in sorted(news)]
    return []


def _refuse_too_large(factors: Factors, layer: str, folder: Path) -> None:
    """Refuse values beyond float32: neither a model nor a measurement could use them."""
    if abs(factors.scale) > LARGEST:
        field = f"{folder / CONFIG_FILE}: lora_alpha or alpha_pattern"
        raise InvalidValue(f"{field} scales {layer} by {factors.scale:.1e}, which float32 cannot hold")
    A, B = (float(x.abs().max()) for x in (factors.A, factors.B))
    update = abs(factors.scale) * factors.rank * A * B  # no entry of s B A is larger; each of the four may be
    if max(A, B, update) > LARGEST:
        raise InvalidValue(
            f"{folder / WEIGHTS_FILE}: the factors of {layer} hold values of up to {max(A, B):.1e}, and their update s B A is more "
            "than float32 can hold; train the adapter again with a smaller learning rate"
        )


def _alpha_of(factors: Factors) -> Any:
    """s r, as an int if it is a whole number, as other programs expect."""
    alpha = factors.scale * factors.rank
    return int(alpha) if alpha == int(alpha) else alpha


def _remedy(folder: Path) -> str:
    """Remedy for weights in another format.  Pickles run code when they are read, so their owner must convert them."""
    if pickles := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)):
        command = converting(folder / pickles[0], folder / WEIGHTS_FILE)
        return f"{pickles[0]} is a pickle, which is not opened here; convert it: {command}"
    if any(folder.glob("*.safetensors.index.json")) or (folder / "model.safetensors").is_file():
        return "the folder holds a model's full weights, not an adapter"
    return "save the adapter with save_pretrained(safe_serialization=True)"


def _alpha(config: dict[str, Any], layer: str) -> float:
    """A layer's alpha: PEFT reads the keys of `alpha_pattern` as regular expressions for the end of a path."""
    alphas = config["alpha_pattern"].items()
    return next((float(alpha) for name, alpha in alphas if at_the_end(layer, name)), float(config["lora_alpha"]))
