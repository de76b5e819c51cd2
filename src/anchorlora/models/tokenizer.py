"""Which tokenizer and chat template count: the adapter's before the model's, and one from a file where there is none."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from anchorlora.config import BaseModelSettings
from anchorlora.errors import InvalidValue, message_of
from anchorlora.paths import expanded

TOKENIZER_CONFIG = "tokenizer_config.json"  # there, where a folder has a tokenizer


def read_tokenizer(origin: Path | str, **how: Any) -> Any:
    """Return the tokenizer in a folder or of the hub; a file of its text that is not UTF-8 is named."""
    try:
        return AutoTokenizer.from_pretrained(origin, **how)
    except UnicodeDecodeError:
        files = (file for file in sorted(Path(origin).glob("*")) if file.suffix in (".json", ".jinja", ".txt"))
        raise _not_utf8(next((file for file in files if not _is_utf8(file.read_bytes())), Path(origin))) from None


def _is_utf8(content: bytes) -> bool:
    return content.decode(errors="ignore").encode() == content


def _not_utf8(path: Path) -> InvalidValue:
    return InvalidValue(f"{path} is not UTF-8; save the file as UTF-8, or fetch it again")


def with_template(tokenizer: Any, settings: BaseModelSettings) -> Any:
    """Return a tokenizer with the date and the chat template of the settings, which never replaces its own."""
    tokenizer.rendered_at = datetime.fromisoformat(settings.date) if settings.date else None
    if settings.chat_template is None:
        return tokenizer
    if tokenizer.chat_template:
        raise InvalidValue(f"the tokenizer of {settings.model} has a chat template of its own; leave out {settings.chat_template}")
    path = expanded(settings.chat_template)
    if not path.is_file():
        raise InvalidValue(f"there is no file {path} for the chat template")
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    return tokenizer


def of_adapter(tokenizer: Any, adapter: Path | None, settings: BaseModelSettings) -> Any:
    """Return the tokenizer that trainers save beside an adapter, with its chat template; the model's own where there is none."""
    if adapter is None or not (adapter / TOKENIZER_CONFIG).is_file():
        return tokenizer
    try:
        own = read_tokenizer(adapter, trust_remote_code=False)
    except Exception as error:  # a folder of files that others wrote
        raise InvalidValue(
            f"the tokenizer in {adapter} cannot be loaded: {message_of(error)}; without its files the model's own is used"
        ) from None
    vocabulary = own.get_vocab()
    other = next((token for token, i in tokenizer.get_vocab().items() if vocabulary.get(token) != i), None)
    if other is not None:
        raise InvalidValue(
            f"the tokenizer in {adapter} is not that of {settings.model}: they differ at {other!r:.40}; "
            "without its files the model's own is used"
        )
    if settings.chat_template is not None and own.chat_template and own.chat_template != tokenizer.chat_template:
        raise InvalidValue(
            f"the tokenizer in {adapter} has a chat template of its own, and {settings.chat_template} is another; leave it out"
        )
    own.chat_template = own.chat_template or tokenizer.chat_template
    own.rendered_at = tokenizer.rendered_at
    return own


def reads_clock(tokenizer: Any) -> bool:
    """Return whether a tokenizer's chat template writes the date."""
    return "strftime_now" in str(tokenizer.chat_template)
