"""Text that a model writes itself: what it knows, where no old data is left.

    with a chat template   the model writes the user's message after the template's beginning, then answers it, as Magpie does
    without                every second text is a question, a line after "Q:", with the model's answer, a line after "A:"; the
                           others begin with the beginning-of-sequence token

The loss on text that is drawn at temperature 1 is its entropy. Tokens are kept as they were drawn: text that is tokenized again may
be other tokens. Every batch of 16 texts has its own numbers, so the tokens do not depend, up to rounding, on how many batches
memory allows at once. Magpie: arXiv 2406.08464.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anchorlora.config import BaseModelSettings
from anchorlora.data.templates import ASKED, render, stop_ids
from anchorlora.devices import free_memory, multiplies_bfloat16
from anchorlora.errors import InvalidValue
from anchorlora.models.drawing import DecodingState, draw
from anchorlora.models.load import device_of, dtype_of, empty_model, ends_of, quantization
from anchorlora.models.packing import WINDOWS, rows_at_once
from anchorlora.text import amount

BATCH = 16  # texts that share a random generator
TOGETHER = 8  # batches, at most, that are drawn at once
FLOAT32 = 4  # bytes
OWN_TOKENS = 40  # of each message
LEAST_TOKENS = 16  # of a message; with less room nothing is said
QUESTION, ANSWER = "Q:", "\nA:"  # what stands before a question and an answer without a template
REPEATING = 0.5  # share of a text's tokens that are one token, from which on it is degenerate


def own_text(
    model: Any,
    tokenizer: Any,
    *,
    count: int,
    seed: int,
    max_tokens: int,
    room: int | None = None,
    chat: bool | None = None,
    written: Path | None = None,
    watch: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Return samples of text that a model writes, as rows of a JSONL file."""
    chat = bool(tokenizer.chat_template) if chat is None else chat
    before, after = frame(tokenizer, chat=chat, room=room)
    stops = stop_ids(tokenizer, ends_of(model))
    free = max_tokens if room is None else room - len(before) - len(after) - 2
    longest = min(max_tokens, max_tokens if room is None and not chat else free // 2)
    rows = _written(written)
    batch, batches = len(rows), 4 * (count // BATCH + 1)  # empty texts are drawn again
    at_once = _batches_at_once(model, 2 * longest + len(before) + len(after))
    watch(min(count, sum(map(len, rows))))
    writer = writing(model) if batch < batches and sum(map(len, rows)) < count else model
    while batch < batches and (missing := count - sum(map(len, rows))) > 0:
        numbers = range(batch, min(batch + at_once, batch - (-missing // BATCH), batches))
        draws = [numbers_of((seed * 1_000_003 + number) % 2**63, longest) for number in numbers]
        made = _write_batches(writer, tokenizer, before, after, draws, chat=chat, stops=stops, longest=longest)
        rows += made
        batch = numbers.stop
        if written is not None:
            written.parent.mkdir(parents=True, exist_ok=True)
            with written.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(texts) + "\n" for texts in made)
        watch(min(count, sum(map(len, rows))))
    texts = [row for made in rows for row in made][:count]
    if len(texts) < count:
        raise InvalidValue(
            f"of {amount(count, 'text')} that the model wrote, {amount(len(texts), 'is', 'are')} not empty; "
            "give a file of old text instead"
        )
    return texts


def frame(tokenizer: Any, *, chat: bool, room: int | None = None) -> tuple[list[int], list[int]]:
    """Return the tokens before the user's message or a question, and those between it and the answer."""
    instead = "give a file of old text instead"
    if tokenizer.eos_token_id is None:
        raise InvalidValue(f"the tokenizer has no end-of-sequence token, with which a text ends; {instead}")
    before = _begin(tokenizer)
    if chat:
        text = render("a chat of the model's own", [{"role": "user", "content": ASKED}], tokenizer, asking=True)
        head, mark, tail = text.partition(ASKED)
        if not mark:
            raise InvalidValue(f"the tokenizer's chat template does not write the user's message; {instead}")
        first, after = (list(tokenizer(part, add_special_tokens=False, verbose=False).input_ids) for part in (head, tail))
        before = first or before
        if not after or int(after[0]) not in tokenizer.get_added_vocab().values():
            raise InvalidValue(
                f"the tokenizer's chat template ends the user's message with no token of its own, so one that the model draws "
                f"would not end; {instead}"
            )
    else:
        asks, after = (list(tokenizer(part, add_special_tokens=False, verbose=False).input_ids) for part in (QUESTION, ANSWER))
        before += asks
    least = len(before) + len(after) + 2 * (LEAST_TOKENS + 1)
    if room is not None and room < least:
        takes = f"max_tokens is {room}, and a text of the model's own takes at least {least}"
        raise InvalidValue(f"{takes}; raise max_tokens, which is --max-length of train")
    return before, after


def _begin(tokenizer: Any) -> list[int]:
    return [int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)]


def refuse_too_large(settings: BaseModelSettings, *, tokens: int) -> None:
    """Refuse, before reading weights, to draw texts if the weights, a batch's keys and values, and its logits do not fit."""
    device, empty = device_of(settings), empty_model(settings)
    free = free_memory(device)
    if free is None:
        return
    how, size = quantization(settings, empty.config), dtype_of(settings).itemsize
    weights = sum(p.numel() for p in empty.parameters()) * (size if how is None else 1 if how == "int8" else 0.5)
    cache = size * BATCH * _cache_size(empty.config.get_text_config(), tokens)
    logits = 2 * FLOAT32 * BATCH * int(getattr(empty.config.get_text_config(), "vocab_size", 0))  # and their probabilities
    if weights + cache + logits <= free:
        return
    texts = f"{BATCH} texts of {tokens} tokens"
    parts = f"{_gib(weights)} of weights, {_gib(cache)} of keys and values of {texts}, {_gib(logits)} of logits"
    ways = ["choose a smaller model", *(["--set quantized=nf4"] if how is None else [])]
    if weights < free:
        ways = ["set a smaller max_tokens", "give old text in a file"]
    raise InvalidValue(
        f"--keep self takes {_gib(weights + cache + logits)} on {device} ({parts}), and {_gib(free)} are free; {', or '.join(ways)}"
    )


def _cache_size(config: Any, tokens: int) -> int:
    """Numbers that a model keeps of a text: a key and a value for each head, in layers that attend, within their window."""
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(1, heads)
    windows = {kind: min(tokens, getattr(config, field, None) or tokens) for field, kind in WINDOWS.items()}
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    held = sum((windows | {"full_attention": tokens}).get(kind, 0) for kind in kinds)
    return int(2 * (getattr(config, "num_key_value_heads", None) or heads) * width * held)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def most_tokens(tokenizer: Any, *, chat: bool, room: int) -> int:
    """Return the most tokens of a text of the model's own, with what the template writes around it."""
    before, after = frame(tokenizer, chat=chat, room=room)
    return min(room, len(before) + len(after) + 2 * OWN_TOKENS + 2)


def defects(rows: Sequence[Mapping[str, Any]], *, stops: Collection[int]) -> dict[str, int]:
    """Return how many texts there are, and how many are repeated, unfinished, or one token again and again."""
    drawn = [tuple(row["completion_ids"]) for row in rows]
    whole = Counter((tuple(row["prompt_ids"]), ids) for row, ids in zip(rows, drawn, strict=True))
    return {
        "texts": len(rows),
        "repeated": len(rows) - len(whole),
        "unfinished": sum(not _is_whole(row, stops) for row in rows),
        "degenerate": sum(len(ids) > 3 and Counter(ids).most_common(1)[0][1] > REPEATING * len(ids) for ids in drawn),
    }


def _is_whole(row: Mapping[str, Any], stops: Collection[int]) -> bool:
    """Tell whether a text ends by itself; the answer to a question, with its line."""
    line = len(row["prompt_ids"]) > 1 and row.get("text", "").endswith("\n")
    return line or row["completion_ids"][-1] in stops


def _batches_at_once(model: Any, tokens: int) -> int:
    """Return how many batches of texts of so many tokens fit into free memory; one if that is unknown."""
    parameter = next(model.parameters())
    free, config = free_memory(parameter.device), model.config.get_text_config()
    size = parameter.dtype.itemsize if parameter.is_floating_point() else FLOAT32
    a_batch = BATCH * (size * _cache_size(config, tokens) + 2 * FLOAT32 * int(getattr(config, "vocab_size", 0)))
    return 1 if free is None else max(1, min(TOGETHER, int(free / (2 * a_batch))))  # a cache that grows is there twice


def numbers_of(seed: int, longest: int) -> Tensor:
    """Return the numbers in [0, 1) of a batch that choose tokens: (2, 16, longest), of the first message and of the second."""
    return torch.rand(2, BATCH, longest, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def writing(model: Any) -> Any:
    """Return the model, or a copy of it in bfloat16 where it is in float32 and the processor multiplies faster so."""
    parameters = list(model.parameters())
    if not multiplies_bfloat16(parameters[0].device) or any(p.dtype != torch.float32 for p in parameters):
        return model
    free = free_memory(parameters[0].device)
    if free is not None and free < 4 * sum(p.numel() for p in parameters):  # twice the copy
        return model
    copy = deepcopy(model, {id(p): nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=False) for p in parameters})
    return copy.merge_and_unload() if hasattr(copy, "merge_and_unload") else copy


def _write_batches(
    model: Any,
    tokenizer: Any,
    before: list[int],
    after: list[int],
    numbers: Sequence[Tensor],
    *,
    chat: bool,
    stops: frozenset[int],
    longest: int,
) -> list[list[dict[str, Any]]]:
    """The texts of each batch that are not empty."""
    first, second = torch.cat(list(numbers), 1)
    asked = [row for row in range(len(first)) if chat or (after and row % 2)]
    plain = sorted({*range(len(first))} - {*asked})
    begin = _begin(tokenizer)
    made: dict[int, dict[str, Any]] = {}

    def text_of(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([i for i in ids if i not in stops], skip_special_tokens=True))

    def first_line(ids: list[int], ends: Collection[int], *, with_end: bool = False) -> list[int]:
        """The tokens before one of the ends or, without a template, before a line's end."""
        last = (i for i, token in enumerate(ids) if token in ends or (not chat and "\n" in tokenizer.decode([token])))
        return ids[: next(last, len(ids)) + with_end]

    drawn = _draw_after(model, tokenizer, [begin] * len(plain), first[plain], stops=stops, longest=longest)
    for row, ids in zip(plain, drawn, strict=True):
        if text_of(ids).strip():
            made[row] = {"text": text_of(ids), "prompt_ids": begin, "completion_ids": ids}

    lines = [] if chat else tokenizer(["\n", "\n\n"], add_special_tokens=False, verbose=False).input_ids
    ends = stops.union(ids[-1] for ids in lines if ids)  # other tokens that end a line need not end the drawing
    ending = ends | {after[0]} if chat else ends
    state = DecodingState.of(model, tokenizer, [before] * len(asked))
    if state.goes_on:
        drawn = draw(model, state, first[asked], stops=ending, longest=longest, leave=0.0)
    else:
        drawn = _draw_after(model, tokenizer, [before] * len(asked), first[asked], stops=ending, longest=longest)
    users = [first_line(ids, ending) for ids in drawn]
    there = [i for i, ids in enumerate(users) if text_of(ids).strip()]
    rows, prompts = [asked[i] for i in there], [[*before, *users[i], *after] for i in there]
    if state.goes_on and there:
        lengths = [len(before) + len(users[i]) for i in there]
        answers = draw(model, state.then(there, lengths, after), second[rows], stops=ends, longest=longest)
    else:
        answers = _draw_after(model, tokenizer, prompts, second[rows], stops=ends, longest=longest)
    for i, row, prompt, ids in zip(there, rows, prompts, answers, strict=True):
        if chat:
            chats = [{"role": "user", "content": text_of(users[i])}, {"role": "assistant", "content": text_of(ids)}]
            made[row] = {"messages": chats, "prompt_ids": prompt, "completion_ids": ids}
        elif text_of(answer := first_line(ids, stops, with_end=True)).strip():
            made[row] = {"text": text_of(prompt[len(begin) :] + answer), "prompt_ids": prompt, "completion_ids": answer}
    return [[made[row] for row in sorted(made) if row // BATCH == batch] for batch in range(len(numbers))]


def _draw_after(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], numbers: Tensor, **how: Any) -> list[list[int]]:
    """Draw after each prompt; at once, if the model reads padded rows."""
    most = rows_at_once(model, max(1, len(prompts)))
    groups = [slice(start, start + most) for start in range(0, len(prompts), most)]
    states = ((DecodingState.of(model, tokenizer, prompts[rows]), numbers[rows]) for rows in groups)
    return [ids for state, own in states for ids in draw(model, state, own, **how)]


def _written(path: Path | None) -> list[list[dict[str, Any]]]:
    """The batches that an earlier call has finished; those that it had only begun are removed."""
    if path is None or not path.is_file():
        return []
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if kept != whole:
        path.write_bytes(kept)
    return [json.loads(line) for line in kept.splitlines()]
