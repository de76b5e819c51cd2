"""Write the result of a run as an adapter or as merged weights, with a model card."""
