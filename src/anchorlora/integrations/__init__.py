"""Protection inside trainers that build the optimizer themselves: one callback each, the same `protect` behind both."""
