"""Export trained adapters, as adapters or as merged weights, with a model card."""
