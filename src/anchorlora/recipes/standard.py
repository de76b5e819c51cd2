"""The recipes of the package.

`standard_cl`: the paper's protocol on a CL_Benchmark folder, for any causal language model.
`mini`: the embedded default, a small base model and four tasks, both made by this project. It differs by a larger learning rate,
since 1e-4 moves so small a model by almost nothing; micro-batches of 8; and one thread, so that results are the same.
`long_sequence`: fifteen tasks in the order of the official O-LoRA scripts, all trained alike; the official script trains MNLI for
two epochs and sets its penalties task by task.
`qwen3_8b`, `mistral_7b`: the study's two base models with its full protocol, 3,625 optimizer steps for a run of four tasks.
`default_recipe`: that of `anchorlora train`, for one skill.
"""

from typing import Any

from anchorlora.config import ALL_LINEAR, Recipe
from anchorlora.recipes.protocol import LONG_ORDER, orders_of, standard_cl


def default_recipe() -> Recipe:
    """Return the settings of `anchorlora train` before the model is known.

    Rank, alpha and schedule are those that people use for LoRA (peft, TRL); rate, epochs and targets are those that plain LoRA and
    the default method chose on SmolLM2 (docs/lab/log.md). Cores are wider than the paper's: kept text of everyday models needs more
    than 20 directions for 93 % of its energy.
    """
    fields: dict[str, Any] = {"name": "train", "orders": {}, "train_limit": None, "test_limit": 200}
    fields |= {"targets": ALL_LINEAR, "rank": 16, "dropout": 0.0, "rows": 1024, "held_out_rows": 64, "at_most": 64}
    fields |= {"epochs": 2, "window": 4, "micro_batch": 4, "batching": "packed", "row_tokens": 4096, "max_tokens": 1024}
    fields |= {"learning_rate": 5e-4, "schedule": "cosine", "warmup": 0.03, "clip_norm": 1.0, "loss": "token_mean"}
    return standard_cl().changed(fields | {"max_new_tokens": 128, "eval_batch": 16})


TASKS = ("entities", "reviews", "questions", "news")


def mini() -> Recipe:
    """Return the embedded recipe: four text-classification tasks in English-like text, with a small base model."""
    fields = {"name": "mini", "data": "embedded:mini", "model": "embedded:mini", "orders": orders_of(TASKS)}
    return standard_cl().changed({**fields, "threads": 1, "learning_rate": 1e-3, "micro_batch": 8, "max_tokens": 128})


def long_sequence() -> Recipe:
    """Return the protocol for fifteen tasks, one epoch each. Data and model are left open."""
    return standard_cl().changed({"name": "long-sequence", "orders": {"order1": LONG_ORDER}})


def qwen3_8b() -> Recipe:
    """Return the study's protocol with Qwen3-8B in bfloat16.  The data folder is left open."""
    return standard_cl().changed({"name": "qwen3-8b", "model": "Qwen/Qwen3-8B", "dtype": "bfloat16"})


def mistral_7b() -> Recipe:
    """Return the study's protocol with Mistral-7B-v0.3 in bfloat16.  The data folder is left open."""
    return standard_cl().changed({"name": "mistral-7b", "model": "mistralai/Mistral-7B-v0.3", "dtype": "bfloat16"})
