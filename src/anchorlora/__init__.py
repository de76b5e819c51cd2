"""anchorlora: protection of learned directions in continual LoRA fine-tuning, enforced after the step and measured.

The public names stand in `__init__.pyi`, and every part of a cataloged method is one, so that its definition is Python after `from
anchorlora import *`. They load when they are first used, so that listing methods
or reading records does not wait for torch, and so that the program listens to signals before it imports anything that takes time.
"""

import lazy_loader

_load, __dir__, _listed = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name == "__all__":
        return sorted({*_listed, *_parts()})
    if name in _listed or name.startswith("_") or not name[:1].isupper():
        return _load(name)
    return _parts().get(name) or _load(name)


def _parts() -> dict[str, object]:
    """Name -> class of every part of a method of the catalog."""
    from anchorlora.methods import METHODS

    return {type(part).__name__: type(part) for method in METHODS.values() for part in method.parts}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("anchorlora")
    except PackageNotFoundError:  # a copy of the folder that was never installed
        return "0"
