"""What a stranger's model folder may not hold: code, an adapter, weights from elsewhere.  Looked at before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anchorlora.adapters import CONFIG_FILE
from anchorlora.adapters.indexed import INDEX, indexed, is_beside
from anchorlora.strict import Unreadable, load

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
NAMED = "transformers_weights"  # the field of a configuration that names the file of weights


def refuse_foreign(place: Path, *, code: bool) -> None:
    """Raises ValueError for an adapter, for weights that lie elsewhere, and for code of its own that is not asked for."""
    config = _fields(place / CONFIG)
    if not code:
        for path, fields in ((place / CONFIG, config), (place / TOKENIZER, _fields(place / TOKENIZER))):
            _refuse_code(path, fields)
    if (place / CONFIG_FILE).is_file():
        raise adapter_inside(str(place))
    named = config.get(NAMED) or INDEX
    if not isinstance(named, str) or not any(
        is_beside(named, ending=ending) for ending in (".safetensors", ".safetensors.index.json")
    ):
        raise ValueError(f"{place / CONFIG} names the weights {named!r:.200} ({NAMED}), which is no safetensors file beside it")
    if named.endswith(".json") and (place / named).is_file():
        indexed(place / named)


def adapter_inside(model: str) -> ValueError:
    """The refusal of a model that brings an adapter, which would be put on its weights as they are loaded."""
    return ValueError(
        f"the model {model} holds an adapter ({CONFIG_FILE}), which would change its weights; "
        "merge the adapter into them, or move its files out of the folder"
    )


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
