"""Greedy decoding of many prompts: read without padding, drafted where the answers are known labels, left early by finished rows.

1. The prompts are read in packed rows, each of which computes what its prompts begin with once.
2. The first token of each answer chooses a draft: the label that begins with it. One forward reads all drafts, and each is accepted
   as far as it is what greedy decoding would have generated.
3. What is left is generated token by token; a row that has ended leaves the batch. The tokens are those of one prompt at a time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from anchorlora.continual.batches import group_items, left_padded
from anchorlora.features.layout import common_prefix, pack
from anchorlora.models.load import cache_in, whole_cache
from anchorlora.models.packing import packed, window_of

LEAVE = 0.75  # rows are selected anew once fewer than this share of them go on
Drafts = Mapping[int, tuple[int, ...]]


def drafts_of(answers: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Return a draft for each first token: the answer that begins with it, or what all answers that do have in common."""
    drafts: dict[int, tuple[int, ...]] = {}
    for first in dict.fromkeys(answer[0] for answer in answers):
        those = list(dict.fromkeys(tuple(answer) for answer in answers if answer[0] == first))
        same = those[0] if len(those) == 1 else those[0][: common_prefix([(*draft, -1 - i) for i, draft in enumerate(those)])]
        if len(same) > 1:
            drafts[first] = same
    return drafts


@dataclass(frozen=True)
class Answering:
    """The tokens and the length that end an answer, and likely answers as drafts; a model may have so many positions alone."""

    stops: Collection[int]
    max_new_tokens: int
    drafts: Drafts = field(default_factory=dict)
    positions: int = sys.maxsize

    def room(self, prompt: int) -> int:
        """Return the most tokens of an answer to a prompt of so many; the last one is not read, so it has no position."""
        return min(self.max_new_tokens, self.positions - prompt + 1)

    def begun(self, likeliest: Sequence[int], right: Sequence[int]) -> list[int]:
        """Return the beginning of a greedy answer, given the likeliest tokens in place of those of the right one."""
        same = next((i for i, pair in enumerate(zip(likeliest, right, strict=True)) if len(set(pair)) > 1), len(right) - 1)
        ended = next((i for i, token in enumerate(likeliest) if token in self.stops), same)
        return list(likeliest[: min(same, ended, self.max_new_tokens - 1) + 1])

    def is_complete(self, answer: Sequence[int], room: int) -> bool:
        """Return True if an answer is complete."""
        return answer[-1] in self.stops or len(answer) >= room


@dataclass(frozen=True)
class Begun:
    """Greedy answers to the prompts of a packed row, of which the beginnings are known, one token at least."""

    kept: Any  # what attention keeps of the row
    places: Sequence[Tensor]  # those in the row of each prompt, and of its answer without the last token
    answers: Sequence[Sequence[int]]


@torch.inference_mode()
def decode(model: nn.Module, prompts: Sequence[Sequence[int]], how: Answering, *, row_tokens: int | None = None) -> list[list[int]]:
    """Return the tokens that greedy decoding generates after each prompt; by default all are read in one row."""
    device, rows = next(model.parameters()).device, list[Begun]()
    for some in group_items(prompts, math.inf if row_tokens is None else row_tokens, lambda prompt, before: len(prompt)):
        layout, ids = pack(some)
        ends = layout.ends().to(device)
        row, positions = torch.tensor([ids], device=device), layout.positions()[None].to(device)
        with packed(model, layout, layout.ends()):
            outputs = model(input_ids=row, position_ids=positions, logits_to_keep=ends, use_cache=True, **whole_cache(model))
        logits = outputs.logits[0] if outputs.logits.shape[1] == len(some) else outputs.logits[0, ends]
        rows.append(Begun(cache_in(outputs), layout.places(), [[token] for token in logits.argmax(-1).tolist()]))
    return finish(model, rows, how)


@torch.inference_mode()
def finish(model: nn.Module, begun: Sequence[Begun], how: Answering) -> list[list[int]]:
    """Return the complete answers of all rows, from their beginnings."""
    answers = [list(answer) for part in begun for answer in part.answers]
    read = [len(there) for part in begun for there in part.places]
    rooms = [how.room(count - len(answer) + 1) for count, answer in zip(read, answers, strict=True)]
    rows = [i for i, answer in enumerate(answers) if not how.is_complete(answer, rooms[i])]
    if not rows:
        return answers
    parts, numbers = list[tuple[Any, Sequence[Tensor]]](), iter(range(len(answers)))
    for part in begun:
        unfinished = [there for there, i in zip(part.places, numbers, strict=False) if i in rows]
        parts += [(part.kept, unfinished)] if unfinished else []
    state, window = _Rows.of(model, parts, how.positions), window_of(model)
    if window is not None and int(state.lengths.max()) + how.max_new_tokens > window:
        how = replace(how, drafts={})  # what is left of drafts that were not accepted would count as tokens of the window
    following = _accept_drafts(model, state, [answers[i] for i in rows], [rooms[i] for i in rows], how)
    while going := [i for i, row in enumerate(rows) if not how.is_complete(answers[row], rooms[row])]:
        if len(going) < LEAVE * len(rows):
            state.select(going)
            rows, following = [rows[i] for i in going], [following[i] for i in going]
        following = [tokens[-1] for tokens in state.step(model, [(token,) for token in following])]
        for row, token in zip(rows, following, strict=True):
            if not how.is_complete(answers[row], rooms[row]):
                answers[row].append(token)
    return answers


def _accept_drafts(model: nn.Module, state: _Rows, answers: Sequence[list[int]], rooms: Sequence[int], how: Answering) -> list[int]:
    """Accept of each draft what the model would have generated, and return the token that each row goes on from."""
    following = [answer[-1] for answer in answers]
    drafts = [how.drafts.get(answer[0], (answer[0],)) if len(answer) == 1 else (answer[-1],) for answer in answers]
    if all(len(draft) == 1 for draft in drafts):
        return following
    fed = [draft[:-1] if len(draft) > 1 and draft[-1] in how.stops else draft for draft in drafts]
    accepted = []
    for answer, room, draft, tokens in zip(answers, rooms, drafts, state.step(model, fed), strict=True):
        count = 1
        while count <= len(tokens) and not how.is_complete(answer, room):
            answer.append(tokens[count - 1])
            if count >= len(draft) or answer[-1] != draft[count]:
                break
            count += 1
        accepted.append(min(count, len(tokens)))
    state.forget(accepted, list(map(len, fed)))
    return [answer[-1] for answer in answers]


class _Rows:
    """Prompts that a model has read, a batch row each, with what attention keeps of them."""

    def __init__(self, argument: str, cache: Any, mask: Tensor, lengths: Tensor, most: int) -> None:
        self.argument, self.cache, self.mask, self.lengths, self.most = argument, cache, mask, lengths, most

    @classmethod
    def of(cls, model: nn.Module, parts: Sequence[tuple[Any, Sequence[Tensor]]], most: int) -> _Rows:
        """Give each prompt a row of its own, padded on the left, with what attention keeps of its places in its packed row."""
        prompts = [places for _, part in parts for places in part]
        device, mask = next(model.parameters()).device, left_padded([torch.ones(len(places)) for places in prompts], 0)
        ((argument, cache),) = whole_cache(model).items()
        indices = left_padded(prompts, 0).to(device).split([len(part) for _, part in parts])

        def own_rows(kept: Tensor, index: Tensor) -> Tensor:
            return kept[0].index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1)

        for number in range(len(parts[0][0].layers)):
            layers = [kept.layers[number] for kept, _ in parts]
            keys = torch.cat([own_rows(layer.keys, index) for layer, index in zip(layers, indices, strict=True)])
            values = torch.cat([own_rows(layer.values, index) for layer, index in zip(layers, indices, strict=True)])
            cache.update(keys, values, number)
        return cls(argument, cache, mask.to(device), torch.tensor(list(map(len, prompts)), device=device), most)

    def step(self, model: nn.Module, tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Read tokens in every row; return the token that follows each of them."""
        longest = max(map(len, tokens))
        device = self.mask.device
        ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in tokens], device=device)
        there = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in tokens], device=device)
        self.mask = torch.cat([self.mask, there], 1)
        positions = (self.lengths[:, None] + torch.arange(longest, device=device)).clamp(max=self.most - 1)  # of complete rows
        kept = {self.argument: self.cache}
        outputs: Any = model(input_ids=ids, attention_mask=self.mask, position_ids=positions, use_cache=True, **kept)
        self.lengths = self.lengths + there.sum(1)
        following = outputs.logits[:, -longest:].argmax(-1).tolist()
        return [row[: len(own)] for row, own in zip(following, tokens, strict=True)]

    def forget(self, accepted: Sequence[int], fed: Sequence[int]) -> None:
        """Take back what was read of drafts beyond the accepted tokens."""
        longest = max(fed)
        for row, (kept, read) in enumerate(zip(accepted, fed, strict=True)):
            self.mask[row, self.mask.shape[1] - longest + kept :] = 0
            self.lengths[row] -= read - kept

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows alone."""
        chosen = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(chosen)
        self.mask, self.lengths = self.mask[chosen], self.lengths[chosen]
