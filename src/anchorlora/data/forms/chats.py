"""Chats: a list of messages, in the words of OpenAI (role, content) or of ShareGPT (from, value)."""

from __future__ import annotations

from anchorlora.data.forms.base import Form, Row
from anchorlora.data.samples import Sample

LEARNED = "every assistant message, with its thought (`reasoning_content`) and its `tool_calls`, as the chat template writes them"


def _conversations(row: Row) -> Sample:
    turns = row.messages("conversations")
    if row.has("system") and turns[0]["role"] == "system":
        raise row.refusal("system and the first message are both the system's; keep one of them")
    system = ({"role": "system", "content": row.text("system")},) if row.has("system") else ()
    return row.chat((*system, *turns))


FORMS = (
    Form("messages", ("messages",), LEARNED, lambda row: row.chat(row.messages("messages")), optional=("tools",)),
    Form("sharegpt", ("conversations",), "the same of ShareGPT's turns", _conversations, optional=("system", "tools")),
)
