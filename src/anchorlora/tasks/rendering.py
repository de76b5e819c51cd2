"""Samples as tokens: those that TRL's SFTTrainer trains on.

Text ends with the end-of-sequence token, chats as the tokenizer's own template ends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.tasks.samples import Sample, is_unicode


def token_ids(samples: Sequence[Sample], tokenizer: Any, *, max_tokens: int) -> Iterator[list[int]]:
    """Yield the tokens of each sample.

    Args:
        samples: Texts and chats.
        tokenizer: A Hugging Face tokenizer.
        max_tokens: Number of tokens per sample, the first ones.

    Raises:
        InvalidValue: A chat has no template to render it, the template refuses it, or the result is not Unicode text.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from anchorlora.embedded import folder
        >>> tokenizer = AutoTokenizer.from_pretrained(folder("embedded:mini", "base_model"))
        >>> [len(ids) for ids in token_ids([Sample("row 1", "What a day!")], tokenizer, max_tokens=3)]
        [3]
    """
    for sample in samples:
        content = sample.content
        if sample.plain is not None and not tokenizer.chat_template:
            content = sample.plain.content
        ids = (
            _text_ids(sample.place, content, tokenizer) if isinstance(content, str) else chat_ids(sample.place, content, tokenizer)
        )
        yield ids[:max_tokens]


def _text_ids(place: str, text: str, tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token or ""
    if not is_unicode(end):
        raise InvalidValue(f"{place}: the tokenizer ends it with characters that are not Unicode text; fetch the tokenizer again")
    return list(tokenizer(text if text.endswith(end) else text + end, verbose=False).input_ids)


def chat_ids(place: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, answering: bool = False) -> list[int]:
    """Return the tokens of a chat, as the tokenizer's chat template renders it.

    Args:
        place: Where it comes from, for messages.
        messages: Objects with role and content.
        tokenizer: A Hugging Face tokenizer.
        answering: End with what the template puts before an answer of the assistant.

    Raises:
        InvalidValue: The tokenizer has no template, the template refuses the messages, or the result is not Unicode text.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from anchorlora.embedded import folder
        >>> tokenizer = AutoTokenizer.from_pretrained(folder("embedded:mini", "base_model"))
        >>> tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %} Answer:{% endif %}"
        >>> tokenizer.decode(chat_ids("row 1", [{"role": "user", "content": "Why?"}], tokenizer, answering=True))
        'Why? Answer:'
    """
    return list(
        tokenizer(rendered(place, messages, tokenizer, asking=answering), add_special_tokens=False, verbose=False).input_ids
    )


def rendered(place: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, asking: bool = False) -> str:
    """Return a chat as the tokenizer's template writes it.

    Args:
        place: Where it comes from, for messages.
        messages: The chat.
        tokenizer: A Hugging Face tokenizer.
        asking: End with what makes the model answer.

    Raises:
        InvalidValue: There is no template, it refuses the chat, or the result is not Unicode text.
    """
    if not tokenizer.chat_template:
        raise InvalidValue(
            f"{place}: this is a chat, and the tokenizer has no chat template; "
            "save the one that was trained with into the adapter's folder, or give the conversations as a column of plain text, "
            "or as prompt and completion"
        )
    try:
        text = tokenizer.apply_chat_template([dict(each) for each in messages], tokenize=False, add_generation_prompt=asking)
    except Exception as error:  # a template is a program of its own and raises what it likes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InvalidValue(f"{place}: the tokenizer's chat template refuses these messages: {reason}") from None
    if not is_unicode(text):
        raise InvalidValue(
            f"{place}: the tokenizer's chat template adds characters that are not Unicode text; fetch the tokenizer again"
        )
    return str(text)
