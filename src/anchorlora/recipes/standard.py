"""The paper's protocol on a CL_Benchmark folder, for any causal language model.

The embedded default: a small base model and four tasks, both made by this project; one cell takes half a minute on a CPU.

The paper's protocol where it works at this size. What differs, and why: the learning rate, since 1e-4 moves a model of this
size by almost nothing in so few steps; micro-batches of 8, which give the same gradient as 8 of 1 apart from dropout masks;
one thread, so that two cells run side by side on two cores and results do not depend on their number.

Fifteen tasks in the order of the official O-LoRA scripts, for any causal language model.

The study's protocol for each task. The official long script trains MNLI for two epochs and sets its penalties task by task; here
every task is learned alike.

The study's two base models, with its protocol in full: 3,625 optimizer steps a run of four tasks.
"""

from anchorlora.config import Adapter, Evaluation, Features, LoadedModel, Recipe, Tasks, Training
from anchorlora.recipes import protocol as p


def standard_cl() -> Recipe:
    """Four tasks, one epoch each; data and model come from the command line."""
    return Recipe(
        name="standard-cl",
        tasks=Tasks(orders=p.orders_of(p.TASKS), train_limit=p.TRAIN_LIMIT),
        base_model=LoadedModel(),
        adapter=Adapter(targets=p.TARGETS, rank=p.RANK, alpha=p.ALPHA, dropout=p.DROPOUT),
        features=Features(
            rows=p.ROWS, held_out_rows=p.HELD_OUT_ROWS, energy=p.ENERGY, at_least=p.AT_LEAST, at_most=p.AT_MOST, wide=p.WIDE
        ),
        training=Training(
            epochs=p.EPOCHS,
            window=p.WINDOW,
            micro_batch=p.MICRO_BATCH,
            learning_rate=p.LEARNING_RATE,
            betas=p.BETAS,
            eps=p.EPS,
            weight_decay=p.WEIGHT_DECAY,
            loss="example_mean",
            max_tokens=p.MAX_TOKENS,
        ),
        evaluation=Evaluation(max_new_tokens=p.MAX_NEW_TOKENS, eval_batch=64),
    )


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


def long_sequence() -> Recipe:
    """Fifteen tasks, one epoch each; data and model come from the command line."""
    recipe = standard_cl()
    tasks = recipe.tasks.model_copy(update={"orders": {"order1": p.LONG_ORDER}})
    return recipe.model_copy(update={"name": "long-sequence", "tasks": tasks})


def qwen3_8b() -> Recipe:
    """Qwen3-8B in bfloat16; the data folder comes from the command line."""
    return _in_full("qwen3-8b", "Qwen/Qwen3-8B")


def mistral_7b() -> Recipe:
    """Mistral-7B-v0.3 in bfloat16; the data folder comes from the command line."""
    return _in_full("mistral-7b", "mistralai/Mistral-7B-v0.3")


def _in_full(name: str, model: str) -> Recipe:
    return standard_cl().changed({"model": model, "dtype": "bfloat16"}).model_copy(update={"name": name})
