"""Fifteen tasks in the order of the official O-LoRA scripts, for any causal language model.

The study's protocol for each task. The official long script trains MNLI for two epochs and sets its penalties task by task; here
every task is learned alike.
"""

from anchorlora.continual.recipe import Recipe
from anchorlora.experiments import protocol as p
from anchorlora.recipes.standard import standard_cl


def long_sequence() -> Recipe:
    """Fifteen tasks, one epoch each; data and model come from the command line."""
    recipe = standard_cl()
    tasks = recipe.tasks.model_copy(update={"orders": {"order1": p.LONG_ORDER}})
    return recipe.model_copy(update={"name": "long-sequence", "tasks": tasks})
