"""Text that a model writes itself: what it knows, where no old data is left.

    with a chat template   the model writes the user's message after the template's beginning, then answers it, as Magpie does
    without                the model writes from the beginning-of-sequence token

Tokens are drawn from the model's own distribution, at temperature 1 and without cuts, so that the loss on the text is its entropy.
Magpie: arXiv 2406.08464.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig

from anchorlora.devices import forked_generators
from anchorlora.errors import InvalidValue

BATCH = 16
MARK = "anchorloramarkswherethemessagebegins"


def own_text(
    model: Any, tokenizer: Any, *, count: int, seed: int, max_tokens: int, chat: bool | None = None
) -> list[dict[str, Any]]:
    """Return samples of text that a model writes, as rows of a JSONL file.

    Args:
        model: A causal language model, with or without an adapter.
        tokenizer: Its tokenizer.
        count: Number of samples.
        seed: Seed of the draws.
        max_tokens: Most tokens of a text, or of each message.
        chat: Whether the model knows its tokenizer's chat template; None for yes where there is one.

    Returns:
        Rows {"messages": [user, assistant]} where the tokenizer has a chat template, else {"text": ..}.

    Raises:
        InvalidValue: The tokenizer has no token to begin with, or the model writes nothing.

    Example:
        >>> from anchorlora.config import BaseModelSettings
        >>> from anchorlora.embedded import folder
        >>> from anchorlora.models.load import load_base_model
        >>> settings = BaseModelSettings(model="embedded:mini", dtype="float32", device="cpu")
        >>> loaded = load_base_model(settings, folder=folder("embedded:mini", "base_model"))
        >>> rows = own_text(loaded.model, loaded.tokenizer, count=2, seed=0, max_tokens=16)
        >>> [list(row) for row in rows]
        [['text'], ['text']]
    """
    if tokenizer.eos_token_id is None:
        raise InvalidValue("the tokenizer has no end-of-sequence token, with which a text ends; give a file of old text instead")
    chat = bool(tokenizer.chat_template) if chat is None else chat
    before, after = _around_a_message(tokenizer) if chat else ([_beginning(tokenizer)], [])
    stop = sorted({int(tokenizer.eos_token_id), *after[:1]})
    rows: list[dict[str, Any]] = []
    with forked_generators():
        torch.manual_seed(seed)
        for _ in range(4 * (count // BATCH + 1)):  # empty texts are drawn again
            for text in _drawn(model, tokenizer, [before] * BATCH, stop=stop, max_tokens=max_tokens):
                if text.strip():
                    rows.append({"messages": [{"role": "user", "content": text.strip()}]} if chat else {"text": text})
            if len(rows) >= count:
                break
        rows = rows[:count]
        for start in range(0, len(rows) if chat else 0, BATCH):
            part = rows[start : start + BATCH]
            prompts = [_asking(tokenizer, row["messages"]) for row in part]
            for row, text in zip(part, _drawn(model, tokenizer, prompts, stop=stop, max_tokens=max_tokens), strict=True):
                row["messages"].append({"role": "assistant", "content": text.strip()})
    if len(rows) < count:
        raise InvalidValue(f"the model wrote {len(rows)} texts that are not empty of {count}; give a file of old text instead")
    return rows


def _asking(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _around_a_message(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of the template before a user's message, and after it."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, found, after = text.partition(MARK)
    if not found:
        raise InvalidValue("the tokenizer's chat template does not write the user's message; give a file of old text instead")
    ids = [list(tokenizer(part, add_special_tokens=False, verbose=False).input_ids) for part in (before, after)]
    return ids[0] or [_beginning(tokenizer)], ids[1]


def _beginning(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


@torch.inference_mode()
def _drawn(model: Any, tokenizer: Any, prompts: list[list[int]], *, stop: list[int], max_tokens: int) -> Iterator[str]:
    pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
    longest, device = max(map(len, prompts)), next(model.parameters()).device
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    # a model's own generation settings would cut its distribution
    how = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=stop, pad_token_id=pad, max_new_tokens=max_tokens
    )
    was_training = model.training
    model.eval()
    try:
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=how)
    finally:
        model.train(was_training)
    for row in found[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in stop), len(row))
        yield tokenizer.decode(row[:end], skip_special_tokens=True)
