"""Check a model folder before anything is loaded: no code of its own, and no weights from elsewhere.

Code that comes with a model runs only where the command line names the exact commit. A configuration can come from anybody, so
its asking for code allows nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anchorlora.config import BaseModelSettings
from anchorlora.errors import InvalidValue
from anchorlora.store.json import read_file
from anchorlora.store.tensors import INDEX, SINGLE, indexed, is_beside
from anchorlora.text import without_secrets

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
NAMED = "transformers_weights"  # the field of a configuration that names the file of weights


def refuse_foreign(folder: Path, *, code: bool) -> None:
    """Refuse a model folder with weights that lie elsewhere, or with code that was not asked for."""
    config = _fields(folder / CONFIG)
    if not code:
        for path, fields in ((folder / CONFIG, config), (folder / TOKENIZER, _fields(folder / TOKENIZER))):
            _refuse_code(path, fields)
    _refuse_elsewhere(folder, config.get(NAMED))


def _refuse_elsewhere(folder: Path, named: Any) -> None:
    """Weights are files beside their configuration, whether it names them, an index does or nothing."""
    if named is not None and not (
        isinstance(named, str) and (is_beside(named) or is_beside(named, ending=".safetensors.index.json"))
    ):
        raise InvalidValue(
            f"{folder / CONFIG} names the weights {named!r:.200} ({NAMED}), which is not a safetensors file next to it"
        )
    read = folder / (named or (SINGLE if (folder / SINGLE).is_file() else INDEX))
    if read.name.endswith(".json") and read.is_file():
        indexed(read)


def _refuse_code(path: Path, fields: dict[str, Any]) -> None:
    """A folder whose configuration names code of its own, wherever that code would come from."""
    if fields.get("auto_map"):
        raise InvalidValue(
            f"{path} names its own code (auto_map), which is not run; read it, and if you trust it give the commit that "
            "it is of, 40 hexadecimal digits: --set trust_remote_code=COMMIT (eval, export: --trust-remote-code COMMIT)"
        )
    for part in (fields, *(value for value in fields.values() if isinstance(value, dict))):  # a part of several has its own
        for name in ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"):
            if "/" in str(part.get(name, "")):
                raise InvalidValue(
                    f"{path} names code from elsewhere ({name}: {part[name]!r:.100}), which is not run; read it, and if you do "
                    "without it remove that line"
                )


def _fields(path: Path) -> dict[str, Any]:
    fields: Any = read_file(path, object, remedy="fetch the model again") if path.is_file() else {}
    if not isinstance(fields, dict):
        raise InvalidValue(f"{path}: not a JSON object; fetch the model again")
    return fields


OPTION = "--trust-remote-code COMMIT"


def asked_for(settings: BaseModelSettings, commit: str | None, *, where: str, option: str = OPTION) -> BaseModelSettings:
    """Return the settings, with the model's code allowed if the command line names its commit."""
    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}", commit):
        name = option.removesuffix("COMMIT").rstrip(" =")
        raise InvalidValue(f"{name} takes the 40 hexadecimal digits of a commit, not {without_secrets(commit)!r:.60}")
    asked = settings.trust_remote_code
    if asked not in (None, commit):
        given = f"the command line gives {commit}" if commit else "the command line does not"
        raise InvalidValue(
            f"{where} asks to run code that comes with its model, as of commit {asked}, and {given}; read that code, and if you "
            f"trust it give {option.replace('COMMIT', asked)}"
        )
    return settings.model_copy(update={"trust_remote_code": commit})
