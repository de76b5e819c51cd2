"""Cached scores of base models: one file per combination of everything that a score depends on, so none is reused wrongly."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from anchorlora.devices import device_name
from anchorlora.models.load import LoadedModel
from anchorlora.store.files import write_text
from anchorlora.store.json import FilePart, read_file
from anchorlora_lab.suites.evaluation import Measured


def ingredients(base_model: LoadedModel, asked: dict[str, Any], *, packages: Sequence[str]) -> dict[str, Any]:
    """Return everything that a base model's score depends on, as the key of the cache."""
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    device = cpu if base_model.device.type == "cpu" else device_name(base_model.device)
    versions = {name: metadata.version(name) for name in packages}
    return {"model": base_model.sha256, "dtype": base_model.dtype, "device": device, **asked, "versions": versions}


class Cached(FilePart):
    """A file of the cache."""

    key: dict[str, Any]
    measured: Measured


@dataclass(frozen=True)
class BaseScores:
    """Cached scores of base models."""

    folder: Path  # where they are kept

    def get(self, key: dict[str, Any], measure: Callable[[], Measured], *, note: Callable[[str], None]) -> Measured:
        """Return the score under a key; measure it if it is missing or damaged, or if the model has no hash."""
        if key["model"] is None:
            note("the base score is not cached: the model's files have no known hash")
            return measure()
        path = self.path(key)
        if path.exists():
            try:
                kept: Cached | None = read_file(path, Cached, remedy="")
            except ValueError:
                kept = None
            if kept and kept.key == key:
                return kept.measured
            note(f"{path} is {'for a different request' if kept else 'damaged'}; measuring the base score again")
        found = measure()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(Cached(key=key, measured=found).model_dump(), indent=1) + "\n")
        except OSError as error:
            note(f"the base score is not cached: {error.strerror}: {path}")
        return found

    def path(self, key: dict[str, Any]) -> Path:
        """Return the file of a key."""
        return self.folder / f"eval-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.json"


def cache_folder() -> Path:
    """The folder `anchorlora` in the user's cache directory."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path.home() / ".cache") / "anchorlora"
