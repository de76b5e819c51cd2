"""Train on tasks one after another: batches, the loop, and what survives a task boundary."""
