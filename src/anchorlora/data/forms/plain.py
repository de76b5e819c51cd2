"""Plain text, and texts that a model wrote, as the tokens that it drew."""

from __future__ import annotations

from dataclasses import replace

from anchorlora.data.forms.base import Form, Row, kind_of
from anchorlora.data.samples import Sample

TOKENS = ("prompt_ids", "completion_ids")


def _text(row: Row) -> Sample:
    return row.plain(row.value("text", str))


def _tokens(row: Row) -> Sample:
    """Text token for token; the other columns are for readers."""
    ids = []
    for name in TOKENS:
        value = row.columns.get(name)
        if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
            raise row.refusal(f"{name} must be a list of token ids, not {kind_of(value)}")
        ids.append(tuple(value))
    written = row.chat(row.messages("messages")) if row.columns.get("messages") is not None else row.plain(row.value("text", str))
    return replace(written, ids=(ids[0], ids[1]))


FORMS = (
    Form("text", ("text",), "every token except the first", _text),
    Form("tokens", TOKENS, "these tokens; `train --keep self` writes such rows", _tokens, optional=("messages", "text")),
)
