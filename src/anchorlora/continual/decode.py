"""Greedy decoding of many prompts: read without padding, drafted where the answers are known labels, left early by finished rows.

1. The prompts are read as one packed row, which computes what they begin with once.
2. The first token of each answer chooses a draft: the label that begins with it. One forward reads all drafts, and each is accepted
   as far as it is what greedy decoding would have generated.
3. What is left is generated token by token; a row that has ended leaves the batch.

The tokens are those of greedy decoding, one prompt at a time, up to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from anchorlora.features.layout import common_prefix, pack
from anchorlora.models.load import cache_argument, cache_in
from anchorlora.models.packing import packed

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
    """Where answers end, and which of them are likely."""

    stops: Collection[int]
    max_new_tokens: int
    drafts: Drafts = field(default_factory=dict)

    def is_complete(self, answer: Sequence[int]) -> bool:
        """Return True if an answer is complete."""
        return answer[-1] in self.stops or len(answer) >= self.max_new_tokens


@torch.inference_mode()
def decode(model: nn.Module, prompts: Sequence[Sequence[int]], how: Answering) -> list[list[int]]:
    """Return the tokens that greedy decoding generates after each prompt."""
    state = _Rows.read(model, prompts)
    answers = [[token] for token in state.first]
    following = _accept_drafts(model, state, answers, how)
    rows = list(range(len(prompts)))
    while going := [i for i, row in enumerate(rows) if not how.is_complete(answers[row])]:
        if len(going) < LEAVE * len(rows):
            state.select(going)
            rows, following = [rows[i] for i in going], [following[i] for i in going]
        following = [tokens[-1] for tokens in state.step(model, [(token,) for token in following])]
        for row, token in zip(rows, following, strict=True):
            if not how.is_complete(answers[row]):
                answers[row].append(token)
    return [answer[: how.max_new_tokens] for answer in answers]


def _accept_drafts(model: nn.Module, state: _Rows, answers: list[list[int]], how: Answering) -> list[int]:
    """Let the model read the draft that each answer's first token chooses, and accept what it would have generated.

    Returns the token that each row goes on from.
    """
    following = [answer[-1] for answer in answers]
    drafts = [how.drafts.get(token, (token,)) for token in following]
    if all(map(how.is_complete, answers)) or all(len(draft) == 1 for draft in drafts):
        return following
    fed = [draft[:-1] if len(draft) > 1 and draft[-1] in how.stops else draft for draft in drafts]
    accepted = []
    for answer, draft, tokens in zip(answers, drafts, state.step(model, fed), strict=True):
        count = 1
        while count <= len(tokens) and not how.is_complete(answer):
            answer.append(tokens[count - 1])
            if count >= len(draft) or answer[-1] != draft[count]:
                break
            count += 1
        accepted.append(min(count, len(tokens)))
    state.forget(accepted, list(map(len, fed)))
    return [answer[-1] for answer in answers]


class _Rows:
    """Prompts that a model has read, a batch row each, with what attention keeps of them."""

    def __init__(self, cache: DynamicCache, mask: Tensor, lengths: Tensor, first: list[int], argument: str) -> None:
        self.cache, self.mask, self.lengths, self.first, self.argument = cache, mask, lengths, first, argument

    @classmethod
    def read(cls, model: nn.Module, prompts: Sequence[Sequence[int]]) -> _Rows:
        """Let the model read the prompts, what they share once."""
        device, (layout, ids) = next(model.parameters()).device, pack(prompts)
        ends = layout.ends().to(device)
        with packed(model, layout, ends):
            outputs = model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=layout.positions()[None].to(device),
                logits_to_keep=ends,
                use_cache=True,
            )
        logits = outputs.logits[0] if outputs.logits.shape[1] == len(prompts) else outputs.logits[0, ends]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        index, mask = torch.zeros(len(prompts), longest, dtype=torch.long), torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, (start, own) in enumerate(zip(layout.starts, layout.lengths, strict=True)):  # padded on the left
            places = torch.cat([torch.arange(layout.prefix), torch.arange(start, start + own)])
            index[i, longest - len(places) :], mask[i, longest - len(places) :] = places, 1
        cache, chosen = DynamicCache(), index.flatten().to(device)
        for number, layer in enumerate(cache_in(outputs).layers):
            keys, values = (
                part[0].index_select(1, chosen).unflatten(1, index.shape).transpose(0, 1) for part in (layer.keys, layer.values)
            )
            cache.update(keys, values, number)
        reader = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)
        argument = cache_argument(type(reader).forward)
        return cls(cache, mask.to(device), lengths.to(device), logits.argmax(-1).tolist(), argument)

    def step(self, model: nn.Module, tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        """Read tokens in every row; return the token that follows each of them."""
        longest = max(map(len, tokens))
        device = self.mask.device
        ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in tokens], device=device)
        there = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in tokens], device=device)
        self.mask = torch.cat([self.mask, there], 1)
        positions = self.lengths[:, None] + torch.arange(longest, device=device)
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
