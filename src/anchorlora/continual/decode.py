"""Greedy decoding of many prompts: read without padding, drafted where the answers are known labels, left early by finished rows.

1. The prompts are read as one packed row, which computes what they begin with once.
2. The first token of each answer chooses a draft: the label that begins with it. One forward reads all drafts, and each is accepted
   as far as it is what greedy decoding would have generated.
3. What is left is generated token by token; a row that has ended leaves the batch.

The tokens are those of greedy decoding, one prompt at a time, up to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from anchorlora.features.layout import Layout, common_prefix
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


@torch.inference_mode()
def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    stops: Collection[int],
    max_new_tokens: int,
    drafts: Drafts,
    device: torch.device,
) -> list[list[int]]:
    """Return the tokens that greedy decoding generates after each prompt."""
    state = _Rows.read(model, prompts, device)
    written: list[list[int]] = [[] for _ in prompts]
    rows, following = list(range(len(prompts))), state.first

    def is_complete(row: int) -> bool:
        """Return True if a prompt's answer is complete."""
        return written[row][-1] in stops or len(written[row]) >= max_new_tokens

    for row, token in zip(rows, following, strict=True):
        written[row].append(token)
    asked = [drafts.get(token, (token,)) for token in following]
    if not all(is_complete(row) for row in rows) and any(len(draft) > 1 for draft in asked):
        fed = [draft[:-1] if len(draft) > 1 and draft[-1] in stops else draft for draft in asked]
        guessed = state.step(model, fed)
        following, accepted = [], []
        for row, draft, tokens in zip(rows, asked, guessed, strict=True):
            count = 1
            while count <= len(tokens) and not is_complete(row):
                token = tokens[count - 1]
                written[row].append(token)
                if count >= len(draft) or token != draft[count]:
                    break
                count += 1
            following.append(written[row][-1])
            accepted.append(min(count, len(tokens)))
        state.forget(accepted, [len(tokens_fed) for tokens_fed in fed])
    while True:
        going = [i for i, row in enumerate(rows) if not is_complete(row)]
        if not going:
            return [tokens[:max_new_tokens] for tokens in written]
        if len(going) < LEAVE * len(rows):
            state.select(going)
            rows, following = [rows[i] for i in going], [following[i] for i in going]
        for i, (row, tokens) in enumerate(zip(rows, state.step(model, [(token,) for token in following]), strict=True)):
            following[i] = tokens[-1]
            if not is_complete(row):
                written[row].append(tokens[-1])


class _Rows:
    """Prompts that a model has read, a batch row each, with what attention keeps of them."""

    def __init__(self, cache: DynamicCache, mask: Tensor, lengths: Tensor, first: list[int], argument: str) -> None:
        self.cache, self.mask, self.lengths, self.first, self.argument = cache, mask, lengths, first, argument

    @classmethod
    def read(cls, model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device) -> _Rows:
        """Let the model read the prompts, what they share once."""
        prefix = common_prefix(prompts) if len(prompts) > 1 else 0
        layout = Layout(prefix, tuple(len(prompt) - prefix for prompt in prompts))
        ids = [*prompts[0][:prefix], *(token for prompt in prompts for token in prompt[prefix:])]
        ends = torch.tensor([prefix, *layout.lengths]).cumsum(0)
        with packed(model, layout, (ends[1:] - 1).to(device)):
            outputs = model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=layout.positions()[None].to(device),
                logits_to_keep=(ends[1:] - 1).to(device),
                use_cache=True,
            )
        logits = outputs.logits[0] if outputs.logits.shape[1] == len(prompts) else outputs.logits[0, ends[1:] - 1]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        index, mask = torch.zeros(len(prompts), longest, dtype=torch.long), torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, length in enumerate(lengths.tolist()):  # padded on the left
            own = torch.arange(int(ends[i]), int(ends[i + 1]))
            index[i, longest - length :], mask[i, longest - length :] = torch.cat([torch.arange(prefix), own]), 1
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
