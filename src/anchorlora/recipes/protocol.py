"""Every number of the study, once, with its unit and source (paper, appendix B unless noted)."""

from __future__ import annotations

from anchorlora.config import Adapter, BaseModelSettings, EvaluationSettings, Features, Recipe, TaskSettings, Training

SEEDS = (38, 42, 2026)
TRACE_POINTS = 64  # per task, both ends included
TASKS = ("dbpedia", "amazon", "yahoo", "agnews")

# Orders as positions in a benchmark's list of four tasks; for Standard CL this list is TASKS (table 3).
ORDERS = {"order1": (0, 1, 2, 3), "order2": (0, 1, 3, 2), "order3": (2, 1, 3, 0)}

# The 15-task order of the official O-LoRA scripts.
LONG_ORDER = tuple("yelp amazon MNLI CB COPA QQP RTE IMDB SST-2 dbpedia agnews yahoo MultiRC BoolQA WiC".split())  # noqa: SIM905

MAX_TOKENS = 512  # prompt and answer
ROWS = 128  # feature rows per layer input and task
ENERGY = 0.93
AT_LEAST = 4
AT_MOST = 20


def orders_of(tasks: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the study's three orders of a benchmark of four tasks, by position (table 3)."""
    return {name: tuple(tasks[i] for i in places) for name, places in ORDERS.items()}


def standard_cl() -> Recipe:
    """Return the paper's protocol: four tasks, one epoch each. Set data and model by `changed` or on the command line."""
    return Recipe(
        name="standard-cl",
        tasks=TaskSettings(orders=orders_of(TASKS), train_limit=10_000),  # only dbpedia has more (14,000 in the official file)
        base_model=BaseModelSettings(),
        adapter=Adapter(targets=("q_proj", "v_proj"), rank=8, alpha=32, dropout=0.1),
        features=Features(
            rows=ROWS,
            held_out_rows=32,  # our addition
            energy=ENERGY,
            at_least=AT_LEAST,
            at_most=AT_MOST,
            wide=64,
        ),
        training=Training(
            epochs=1,
            window=8,
            micro_batch=1,
            learning_rate=1e-4,
            betas=(0.9, 0.999),
            eps=1e-8,  # torch's default; the paper names none
            weight_decay=0.0,
            loss="example_mean",
            max_tokens=MAX_TOKENS,
        ),
        evaluation=EvaluationSettings(max_new_tokens=50, eval_batch=64),
    )


# not part of the study: no result depends on it
SAVE_EVERY = 100  # optimizer steps between two saves within a task
