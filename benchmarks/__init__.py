"""Speed and memory as ratios, measured side by side in one process.  `python -m benchmarks` prints them; nothing asserts."""
