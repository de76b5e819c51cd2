"""What a stranger's model folder may not hold: code, and weights from elsewhere.  Looked at before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anchorlora.adapters.indexed import INDEX, SINGLE, indexed, is_beside
from anchorlora.strict import Unreadable, load

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
NAMED = "transformers_weights"  # the field of a configuration that names the file of weights


def refuse_foreign(place: Path, *, code: bool) -> None:
    """Raises ValueError for weights that lie elsewhere, and for code of its own that is not asked for."""
    config = _fields(place / CONFIG)
    if not code:
        for path, fields in ((place / CONFIG, config), (place / TOKENIZER, _fields(place / TOKENIZER))):
            _refuse_code(path, fields)
    _refuse_elsewhere(place, config.get(NAMED))


def _refuse_elsewhere(place: Path, named: Any) -> None:
    """Weights are files beside their configuration, whether it names them, an index does or nothing."""
    if named is not None and not (
        isinstance(named, str) and (is_beside(named) or is_beside(named, ending=".safetensors.index.json"))
    ):
        raise ValueError(f"{place / CONFIG} names the weights {named!r:.200} ({NAMED}), which is no safetensors file beside it")
    read = place / (named or (SINGLE if (place / SINGLE).is_file() else INDEX))
    if read.name.endswith(".json") and read.is_file():
        indexed(read)


def _refuse_code(path: Path, fields: dict[str, Any]) -> None:
    """A folder whose configuration names code of its own, wherever that code would come from."""
    if fields.get("auto_map"):
        raise ValueError(
            f"{path} names code of its own (auto_map), which is not run; read it, and if you trust it give the commit that "
            "it is of, 40 hexadecimal digits: --set trust_remote_code=COMMIT (general, export: --trust-remote-code COMMIT)"
        )


def _fields(path: Path) -> dict[str, Any]:
    try:
        found = load(path) if path.is_file() else {}
    except Unreadable as error:
        raise ValueError(f"{path}: {error}; fetch the model again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: no object of fields; fetch the model again")
    return found
