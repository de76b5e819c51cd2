"""The embedded default: a small backbone and four tasks, both made by this project; one cell takes half a minute on a CPU.

The paper's protocol where it works at this size. What differs, and why: the learning rate, since 1e-4 moves a model of this
size by almost nothing in so few steps; micro-batches of 8, which give the same gradient as 8 of 1 apart from dropout masks;
one thread, so that two cells run side by side on two cores and results do not depend on their number.
"""

from anchorlora.continual.recipe import Recipe
from anchorlora.experiments import protocol as p
from anchorlora.recipes.standard import standard_cl

TASKS = ("entities", "reviews", "questions", "news")


def mini() -> Recipe:
    """Four text-classification tasks in English-like text."""
    recipe = standard_cl().changed(
        {
            "data": "embedded:mini",
            "model": "embedded:mini",
            "threads": 1,
            "learning_rate": 1e-3,
            "micro_batch": 8,
            "max_tokens": 128,
        }
    )
    tasks = recipe.tasks.model_copy(update={"orders": p.orders_of(TASKS)})
    return recipe.model_copy(update={"name": "mini", "tasks": tasks})
