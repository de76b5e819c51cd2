"""Plan and run many runs: grids, traces and selections."""
