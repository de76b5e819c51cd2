"""anchorlora: protection of learned directions in continual LoRA fine-tuning, enforced after the step and measured.

The public names stand in `__init__.pyi`, and nothing else is public. They load when they are first used, so that listing methods
or reading records does not wait for torch, and so that the program listens to signals before it imports anything that takes time.
"""

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name != "__version__":
        return _load(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("anchorlora")
    except PackageNotFoundError:  # a copy of the folder that was never installed
        return "0"
