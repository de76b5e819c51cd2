"""Load base models and tokenizers, after looking at their files."""
