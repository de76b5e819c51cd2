"""Complete runs as Python functions; they travel with the wheel.  A new one is one function here, added to RECIPES."""

from __future__ import annotations

from collections.abc import Callable

from anchorlora.continual.recipe import Recipe
from anchorlora.recipes.mini import mini
from anchorlora.recipes.standard import standard_cl

RECIPES: dict[str, Callable[[], Recipe]] = {"mini": mini, "standard-cl": standard_cl}

__all__ = ["RECIPES", "mini", "standard_cl"]
