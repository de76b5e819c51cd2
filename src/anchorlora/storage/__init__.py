"""Write and read files safely: whole or not at all, checked when they are read."""
