"""The files that an estimate needs of a model on the hub: its cached folder, or an answer of the hub within two seconds.

Loading a model asks the hub again and again for half a minute, which is right for a run and wrong for a question.
"""

from __future__ import annotations

import threading
from pathlib import Path

from anchorlora.config import BaseModelSettings
from anchorlora.errors import InvalidValue
from anchorlora.paths import expanded, nearest
from anchorlora.store.adapter_config import CONFIG_FILE

PATIENCE = 1.5  # seconds
CONFIG = "config.json"


def is_path(name: str) -> bool:
    """Return True if the name of a model is a path rather than a name on the hub."""
    return expanded(name).exists() or name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1


def refuse_no_model(name: str) -> None:
    """Refuse a path at which there is no model."""
    if not is_path(name) or ((folder := expanded(name)) / CONFIG).is_file():
        return
    adapter = (folder / CONFIG_FILE).is_file()
    more = "; it is an adapter's folder: give the base model of the adapter in its place" if adapter else nearest(folder)
    raise InvalidValue(f"no model at {name}: it has no config.json{more}")


def cached_folder(settings: BaseModelSettings) -> Path | None:
    """Return the folder of the hub's cache that holds a model's configuration, or None if the hub has to be asked for it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name, revision = settings.model, settings.trust_remote_code or settings.revision
    if name is None or is_path(name):
        return None
    try:
        file = try_to_load_from_cache(name, CONFIG, revision=revision)
    except HFValidationError:  # reading it says what is wrong with the name
        return None
    if isinstance(file, str):
        return Path(file).parent
    reason = _silence(name, revision)
    if reason is not None:
        raise InvalidValue(
            f"the configuration of the model {name} is not in the local cache, and the hub does not answer: {reason}; give a "
            f"folder with --model, or fetch the model where there is a network (hf download {name})"
        )
    return None


def _silence(name: str, revision: str | None) -> str | None:
    """Why the hub does not answer one request; None if it does, if only to refuse."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    reasons: list[str | None] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), timeout=PATIENCE)
            reasons.append(None)
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            reasons.append(f"status {status}" if status >= 500 else None)
        except Exception as error:
            reasons.append(str(error).strip().partition("\n")[0] or type(error).__name__)

    asking = threading.Thread(target=ask, daemon=True)  # looking a name up takes as long as the system wants
    asking.start()
    asking.join(PATIENCE)
    return reasons[0] if reasons else f"nothing within {PATIENCE:g} seconds"
