"""Measure general capability with lm-evaluation-harness, before and after."""
