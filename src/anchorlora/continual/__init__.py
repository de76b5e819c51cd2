"""Learning tasks one after another: recipe, loop, sequence, and what survives a boundary."""

from anchorlora.continual.recipe import Cell, Recipe

__all__ = ["Cell", "Recipe"]
