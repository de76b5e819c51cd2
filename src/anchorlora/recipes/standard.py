"""The paper's protocol on a CL_Benchmark folder, for any causal language model."""

from anchorlora.continual.recipe import Adapter, Backbone, Evaluation, Features, Recipe, Tasks, Training
from anchorlora.experiments import protocol as p


def standard_cl() -> Recipe:
    """Four tasks, one epoch each; data and model come from the command line."""
    return Recipe(
        name="standard-cl",
        tasks=Tasks(orders=p.orders_of(p.TASKS), train_limit=p.TRAIN_LIMIT),
        backbone=Backbone(),
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
