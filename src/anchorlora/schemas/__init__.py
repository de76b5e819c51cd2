"""Schemas of the files that this library writes, as validated types.  Imports no torch."""
