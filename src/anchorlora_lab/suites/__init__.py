"""General capability before and after training, measured with lm-evaluation-harness."""
