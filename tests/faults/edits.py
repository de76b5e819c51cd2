"""States that somebody has changed and sealed again."""

from __future__ import annotations

import shutil

from safetensors import safe_open

import small
from anchorlora.experiments.sealed import seal


def edited(folder, tmp_path, change, *, at):
    """A copy of a run in which `change` got one of its sealed folders, which is sealed again."""
    out = tmp_path / "edited"
    shutil.copytree(folder, out)
    change(out / at)
    (out / at / "SEAL.json").unlink()
    beside = out / "tasks" / f"{at[-1]}-{small.ORDER[int(at[-1]) - 1]}" if at[-1].isdigit() and "begun" not in at else None
    files = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "cores.safetensors")
    seal(out / at, beside={name: beside / name for name in files} if beside else None)
    return out


def tensors_of(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
