"""Experiments: the study's numbers, run directories, checks and comparisons.  Modules load when they are first used."""

import lazy_loader

# `anchorlora.experiments.protocol` is plain numbers and must not wait for torch
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"run": ["run_sequence"], "cores": ["read_cores", "write_cores"], "feature_cores": ["cores_from_data"]},
)
