"""Complete runs as Python functions, by name in `RECIPES`; they are part of the wheel.

To add one, write a function that returns a `Recipe` and list it in `RECIPES`.
"""

from __future__ import annotations

from collections.abc import Callable

from anchorlora.config import Recipe
from anchorlora.recipes.standard import long_sequence, mini, mistral_7b, qwen3_8b, standard_cl

RECIPES: dict[str, Callable[[], Recipe]] = {
    "mini": mini,
    "standard-cl": standard_cl,
    "long-sequence": long_sequence,
    "qwen3-8b": qwen3_8b,
    "mistral-7b": mistral_7b,
}

__all__ = ["RECIPES", "long_sequence", "mini", "mistral_7b", "qwen3_8b", "standard_cl"]
