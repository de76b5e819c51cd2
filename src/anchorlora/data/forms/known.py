"""The forms of rows that people keep: chats, prompts with their answers, and plain text; and those that are refused.

Chats are lists of messages in the words of OpenAI (role, content) or of ShareGPT (from, value). A prompt with its answer stands as
it is (prompt, completion), or is an instruction that a chat template renders. Texts that a model wrote are the tokens that it drew.
Rows that say how good an answer is would be learned as if each were good; their refusal names the trainers that learn them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from anchorlora.data.forms.base import Form, Row, kind_of
from anchorlora.data.samples import Message, Sample

LEARNED = "every assistant message, with its thought (`reasoning_content`) and its `tool_calls`, as the chat template writes them"
# Stanford Alpaca's prompts, with and without an input
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA = "the output; formatted as a chat if the tokenizer has a template, otherwise as Alpaca's prompt"
TOKENS = ("prompt_ids", "completion_ids")
PAIRS = (
    "are a preference pair, for TRL's DPOTrainer with ProtectionCallback; to learn the chosen answers alone, name them, with "
    "--columns prompt=prompt,completion=chosen, or question=MINE,answer=chosen; whole chats with messages=chosen, whole texts with "
    "chosen"
)
KTO = (
    "is true or false, as in rows for KTO, and every answer would be learned as good; keep the good rows, without this column, "
    "or train with TRL's KTOTrainer and ProtectionCallback"
)


def _conversations(row: Row) -> Sample:
    turns = row.messages("conversations")
    if row.has("system") and turns[0]["role"] == "system":
        raise row.refusal("system and the first message are both the system's; keep one of them")
    system = ({"role": "system", "content": row.text("system")},) if row.has("system") else ()
    return row.chat((*system, *turns))


def _as_it_stands(row: Row, *, asks: str, says: str) -> Sample:
    """Two texts, one after the other; or two lists of messages, of which the first may begin the answer."""
    prompt, answer = row.alike(asks, says)
    if isinstance(prompt, str):
        return row.plain(prompt + answer, given=len(prompt))
    if prompt[-1]["role"] == answer[0]["role"] == "assistant":
        begun = prompt[-1]["content"]  # one message, of which the prompt has the beginning
        whole = {**prompt[-1], **answer[0], "content": begun + answer[0]["content"]}
        return row.chat((*prompt[:-1], whole, *answer[1:]), given=len(prompt) - 1, continued=len(begun))
    return row.chat((*prompt, *answer), given=len(prompt))


def _read_instruction(row: Row, *, asks: str, says: str) -> Sample:
    """A chat of two messages, after a system message and earlier turns if there are any."""
    if asks != "instruction" and not isinstance(row.content(asks), str):
        if row.has("system"):
            raise row.refusal(f"column system would not be learned; put it into {asks} as its first message")
        return _as_it_stands(row, asks=asks, says=says)
    row.refuse_written(asks, says)
    prompt, answer, further = row.value(asks, str), row.value(says, str), row.text("input") if asks == "instruction" else ""
    turn = (_message("user", f"{prompt}\n{further}" if further else prompt), _message("assistant", answer))
    before = [_message("system", row.text("system"))] if row.has("system") else []
    for pair in row.value("history", list) if row.has("history") else ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise row.refusal(f"history is a list of pairs of a prompt and its answer, not {pair!r:.60}")
        before += [_message("user", pair[0]), _message("assistant", pair[1])]
    if before or row.has("tools"):
        return row.chat((*before, *turn))
    question = (WITH_INPUT if further else WITHOUT_INPUT).format(instruction=prompt, input=further)
    return Sample(row.place, turn, given=1, plain=question)


def instruction_of(sample: Sample) -> dict[str, str]:
    """Return an instruction as a row that is read as it was, with its input where Alpaca's prompt has one."""
    asked, answer = (str(message["content"]) for message in sample.content if not isinstance(message, str))
    before, between, after = re.split(r"\{\w+\}", WITH_INPUT)
    words = sample.plain.removeprefix(before).removesuffix(after)
    for mark in re.finditer(re.escape(between), words) if sample.plain.startswith(before) else ():
        instruction, further = words[: mark.start()], words[mark.end() :]
        if f"{instruction}\n{further}" == asked:
            return {"instruction": instruction, "input": further, "output": answer}
    return {"instruction": asked, "output": answer}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _pair(asks: str, says: str) -> Form:
    about = f"the {says}, after the {asks} as it stands; both may be texts or lists of messages"
    return Form(f"{asks}-{says}", (asks, says), about, partial(_as_it_stands, asks=asks, says=says), optional=("tools",))


def _instruction(asks: str, says: str, *, about: str = "", optional: tuple[str, ...] = ("system", "tools")) -> Form:
    about = about or f"the {says}; a chat, as above"
    return Form(f"{asks}-{says}", (asks, says), about, partial(_read_instruction, asks=asks, says=says), optional=optional)


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


def _kto(column: str) -> Form:
    def holds(columns: Mapping[str, Any]) -> bool:
        return str(columns[column]).strip().lower() in ("true", "false")

    return Form("kto", (column,), "refused: KTO judges whole answers", refuses=KTO, holds=holds, even_named=True)


FORMS = (
    Form("messages", ("messages",), LEARNED, lambda row: row.chat(row.messages("messages")), optional=("tools",)),
    Form("sharegpt", ("conversations",), "the same of ShareGPT's turns", _conversations, optional=("system", "tools")),
    _pair("prompt", "completion"),
    _pair("prompt", "answer"),
    _instruction("instruction", "output", about=ALPACA, optional=("input", "system", "history", "tools")),
    _instruction("input", "output"),
    _instruction("question", "answer"),
    _instruction("question", "response"),
    _instruction("prompt", "response"),
    Form("text", ("text",), "every token except the first", lambda row: row.plain(row.value("text", str))),
    Form("tokens", TOKENS, "these tokens; `train --keep self` writes such rows", _tokens, optional=("messages", "text")),
    Form("preferences", ("chosen", "rejected"), "refused: DPO learns from pairs", refuses=PAIRS),
    _kto("label"),
    _kto("kto_tag"),
)
