"""The laboratory of anchorlora: grids of runs, selection, reports and public benchmarks; `anchorlora[lab]` has its libraries."""
