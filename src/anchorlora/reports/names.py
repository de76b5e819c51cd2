"""Short names for files and for layers."""

from __future__ import annotations

import re
from collections.abc import Sequence


def file_name(text: str) -> str:
    """The text as a file's name, less its suffix."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:120]


def short_layers(modules: Sequence[str]) -> list[str]:
    """Layer paths less the parts that all of them share: model.layers.3.self_attn.q_proj -> 3.q_proj."""
    parts = [module.split(".") for module in modules]
    if len({len(path) for path in parts}) != 1 or len(parts) < 2:
        return list(modules)
    told = [i for i in range(len(parts[0])) if len({path[i] for path in parts}) > 1]
    return [".".join(path[i] for i in told) for path in parts]
