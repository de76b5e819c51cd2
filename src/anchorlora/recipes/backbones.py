"""The study's two backbones, with its protocol in full: 3,625 optimizer steps a run of four tasks."""

from anchorlora.continual.recipe import Recipe
from anchorlora.recipes.standard import standard_cl


def qwen3_8b() -> Recipe:
    """Qwen3-8B in bfloat16; the data folder comes from the command line."""
    return _in_full("qwen3-8b", "Qwen/Qwen3-8B")


def mistral_7b() -> Recipe:
    """Mistral-7B-v0.3 in bfloat16; the data folder comes from the command line."""
    return _in_full("mistral-7b", "mistralai/Mistral-7B-v0.3")


def _in_full(name: str, model: str) -> Recipe:
    return standard_cl().changed({"model": model, "dtype": "bfloat16"}).model_copy(update={"name": name})
