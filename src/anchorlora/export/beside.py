"""Parts of an export from the base model and the source's own folder: module names, tokenizer, license, data sets.

Nothing here stops an export. What is not at hand stays out, and the command says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from anchorlora import embedded
from anchorlora.adapters.targets import named
from anchorlora.config import BaseModelSettings
from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.models.hub import cached_folder, is_path
from anchorlora.models.load import module_names, stops_beyond, tokenizer_of
from anchorlora.models.trust import refuse_foreign
from anchorlora.paths import expanded
from anchorlora.store.adapter_config import read_config

CARD = "README.md"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*", re.ASCII)
SEES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")  # what servers of such a model read
CHOOSES = ("exclude_modules", "layers_to_transform", "layers_pattern")  # fields by which PEFT leaves some matching layers out


def beside(adapter: Path, layers: Iterable[str], base_model: BaseModelSettings) -> tuple[list[str], Any]:
    """Return what is written beside an adapter: `target_modules`, and the tokenizer of the source's folder, else the base model's,
    else None.

    `target_modules` are the last parts of the layers' names if these select the same layers of the base model, else the source's
    own names, else whole paths.
    """
    targets, tokenizer = _targets(sorted(layers), modules_of(base_model), adapter), _at_hand(lambda: tokenizer_in(adapter))
    return targets, _read_base(base_model, tokenizer_of) if tokenizer is None else tokenizer


def unknown_ends(tokenizer: Any, base_model: BaseModelSettings) -> list[int]:
    """Return the tokens at which a chat template ends answers and servers of the base model do not stop."""
    if tokenizer is None or not tokenizer.chat_template:
        return []
    return _read_base(base_model, partial(stops_beyond, tokenizer)) or []


def modules_of(base_model: BaseModelSettings) -> list[str] | None:
    """Return the paths of the base model's modules; None if it is not at hand."""
    return _read_base(base_model, module_names)


def _read_base(base_model: BaseModelSettings, read: Callable[..., Any]) -> Any:
    """Return what is read of the base model, none of whose code runs; None where it is not at hand."""
    revision = base_model.trust_remote_code or base_model.revision
    settings = base_model.model_copy(update={"trust_remote_code": None, "revision": revision})
    known, folder = _locate(settings)
    return _at_hand(lambda: read(settings, folder=folder)) if known else None


def processing_files(base_model: BaseModelSettings) -> list[Path]:
    """Return the files of the base model that say how images and sound become its inputs."""
    files, revision = list[Path](), base_model.trust_remote_code or base_model.revision
    for name in SEES if base_model.model is not None else ():
        with suppress(OSError):  # it has none, or the hub does not answer
            files.append(Path(str(cached_file(str(_locate(base_model)[1] or base_model.model), name, revision=revision))))
    return files


def terms(adapter: Path, base_model: BaseModelSettings) -> tuple[str | None, list[str]]:
    """Return the license that the source's card names, or else the base model's, and the data sets that the source's card names."""
    card = _metadata(adapter)
    licenses, datasets = (card.get("license"), _metadata(_locate(base_model)[1]).get("license")), card.get("datasets")
    return (
        next((name for name in licenses if isinstance(name, str) and LICENSE.fullmatch(name)), None),
        [name for name in datasets if isinstance(name, str) and HUB_NAME.fullmatch(name)] if isinstance(datasets, list) else [],
    )


def _targets(layers: list[str], names: list[str] | None, adapter: Path) -> list[str]:
    short = sorted({layer.rpartition(".")[2] for layer in layers})
    if names is not None:
        return short if sorted(name for name in names if named(name, short)) == layers else layers
    config = read_config(adapter)
    modules = config.get("target_modules")
    if isinstance(modules, list) and not any(config.get(name) for name in CHOOSES) and all(named(n, modules) for n in layers):
        return modules  # PEFT adapted every layer that they select, and these are all
    return layers


def _locate(settings: BaseModelSettings) -> tuple[bool, Path | None]:
    """Return whether the base model can be read, and its folder; None if it is read from the hub."""
    if settings.model is None:
        return False, None
    if is_path(settings.model):
        folder = expanded(settings.model)
        return folder.is_dir(), folder
    try:
        return True, embedded.folder(settings.model, "base_model") or cached_folder(settings)
    except (InvalidValue, UnknownName):  # the hub does not answer
        return False, None


def tokenizer_in(folder: Path) -> Any:
    """Return the tokenizer that lies beside an adapter; None where there is none."""
    if not any(folder.glob("tokenizer*")):
        return None
    refuse_foreign(folder, code=False)
    return tokenizer_of(BaseModelSettings(model=str(folder)), folder=folder)


def _metadata(folder: Path | None) -> dict[str, Any]:
    """Front matter of the card in a folder."""
    from huggingface_hub.repocard import metadata_load

    if folder is None or not (folder / CARD).is_file():
        return {}
    try:
        return metadata_load(folder / CARD) or {}
    except Exception:  # somebody's YAML
        return {}


def _at_hand(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except InvalidValue:
        return None
