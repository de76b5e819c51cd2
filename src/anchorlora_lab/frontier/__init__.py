"""The frontier of learning and keeping: methods by their curves over rate, epochs and scale, on skills that are made by rule."""
