"""Protection in trainers that build the optimizer themselves: one callback each, around the same `protect`."""
