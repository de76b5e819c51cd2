"""Every number of the study, once, with its unit and source (paper, appendix B unless noted)."""

from __future__ import annotations

SEEDS = (38, 42, 2026)
TRACE_POINTS = 64  # per task, both ends included
TASKS = ("dbpedia", "amazon", "yahoo", "agnews")

# Orders as positions in a benchmark's list of four tasks; for Standard CL this list is TASKS (table 3).
ORDERS = {"order1": (0, 1, 2, 3), "order2": (0, 1, 3, 2), "order3": (2, 1, 3, 0)}

# The 15-task order of the official O-LoRA scripts.
LONG_ORDER = tuple("yelp amazon MNLI CB COPA QQP RTE IMDB SST-2 dbpedia agnews yahoo MultiRC BoolQA WiC".split())  # noqa: SIM905

RANK = 8
ALPHA = 32
DROPOUT = 0.1
TARGETS = ("q_proj", "v_proj")

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPS = 1e-8  # torch's default; the paper names none
WEIGHT_DECAY = 0.0
EPOCHS = 1
WINDOW = 8  # examples per optimizer step
MICRO_BATCH = 1  # examples per forward
MAX_TOKENS = 512  # prompt and answer
MAX_NEW_TOKENS = 50
TRAIN_LIMIT = 10_000  # examples per task, in file order; only dbpedia has more (14,000 in the official file)

ROWS = 128  # feature rows per layer input and task
HELD_OUT_ROWS = 32  # further rows, for measuring only; our addition
ENERGY = 0.93
AT_LEAST = 4
AT_MOST = 20
WIDE = 64


def orders_of(tasks: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the study's three orders of a benchmark of four tasks, by position (table 3)."""
    return {name: tuple(tasks[i] for i in places) for name, places in ORDERS.items()}


# not part of the study: no result depends on it
SAVE_EVERY = 100  # optimizer steps between two saves within a task
