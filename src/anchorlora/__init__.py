"""anchorlora: protection of learned directions in continual LoRA fine-tuning, enforced after the step and measured.

The public names stand in `__init__.pyi`, and nothing else is public. They load when they are first used, so that listing methods
or reading records does not wait for torch.
"""

from importlib.metadata import PackageNotFoundError, version

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

try:
    __version__ = version("anchorlora")
except PackageNotFoundError:  # a copy of the folder that was never installed
    __version__ = "0"
