"""Run one method on one order of tasks with one seed, in a directory that survives interruption."""
