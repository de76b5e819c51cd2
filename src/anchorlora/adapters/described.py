"""Whether a saved adapter's configuration describes the factors beside it: what PEFT would make of it is what the file holds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from anchorlora.adapters.targets import named
from anchorlora.geometry import Factors

# with these the model is more than its base and factors of plain LoRA blocks on its layers
MORE_THAN_FACTORS = ("layer_replication", "modules_to_save", "target_parameters", "trainable_token_indices")


def refuse_undescribed(saved: Mapping[str, Factors], config: Mapping[str, Any], *, where: Path) -> None:
    """Raises ValueError that names the field where the configuration at `where` gives a layer no block, or one of another rank."""
    for name in MORE_THAN_FACTORS:
        if config.get(name):
            raise ValueError(f"{where} sets {name}, of which the weights hold nothing; train a plain LoRA adapter instead")
    for layer, f in saved.items():
        field = _leaves_out(layer, config)
        if field:
            raise ValueError(f"{where}: {field} leaves out {layer}, whose factors the weights hold; they do not fit")
        field, rank = _rank(layer, config)
        if type(rank) is not int or rank != f.rank:
            raise ValueError(f"{where}: {field} is {rank!r:.40} for {layer}, but the weights hold rank {f.rank}; they do not fit")


def _leaves_out(layer: str, config: Mapping[str, Any]) -> str | None:
    """The field that keeps PEFT from adapting a layer.  Names of modules are compared, never followed as patterns."""
    excluded, targets = config.get("exclude_modules"), config.get("target_modules")
    if isinstance(excluded, list) and named(layer, excluded):
        return "exclude_modules"
    if targets is None or targets == "all-linear" or layer in targets:
        return None
    if not named(layer, targets):
        return "target_modules"
    return None if _of_these_numbers(layer, config) else "layers_to_transform"


def _of_these_numbers(layer: str, config: Mapping[str, Any]) -> bool:
    """Whether the number in a layer's path is one of layers_to_transform, if those are given."""
    numbers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if numbers is None or numbers == []:
        return True
    steps = pairwise(layer.split("."))
    own = next((step for parent, step in steps if step.isdecimal() and (not patterns or parent in patterns)), None)
    return own in {str(n) for n in (numbers if isinstance(numbers, list) else [numbers]) if type(n) is int}


def _rank(layer: str, config: Mapping[str, Any]) -> tuple[str, Any]:
    """A layer's rank, whatever it is, and the field that gives it."""
    for name, rank in (config.get("rank_pattern") or {}).items():
        if named(layer, (name,)):
            return "rank_pattern", rank
    return "r", config.get("r", 8)  # PEFT's own default
