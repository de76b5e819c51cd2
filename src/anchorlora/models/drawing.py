"""Tokens that a model draws in many rows at once, at temperature 1 and without cuts, by numbers that are given.

A token is the first whose cumulated probability exceeds a number in [0, 1). Rows that have ended leave, and what was read of a row
may go on: a message that was drawn, and then its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerationMixin

from anchorlora.adapters.kinds import without_empty
from anchorlora.devices import evaluating, in_float64
from anchorlora.models.head import of_own_rows
from anchorlora.models.load import cache_argument, cache_in, may_be_masked, pad_of

LEAVE = 0.75  # rows are selected anew once fewer than this share of them go on


@dataclass
class DecodingState:
    """Rows of tokens of which some are masked, and what attention keeps of the first of them: `ids` and `mask` (rows, n)."""

    ids: Tensor
    mask: Tensor
    cache: Any
    pad: int
    goes_on: bool  # whether tokens that were read may be masked, with others behind

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> DecodingState:
        """Return prompts, padded on the left; where all are alike, one is read but for its last token."""
        pad, device = pad_of(tokenizer), next(model.parameters()).device
        width = max(map(len, prompts), default=0)
        ids = torch.tensor([[pad] * (width - len(prompt)) + [*prompt] for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        alike = width > 1 and all(prompt == prompts[0] for prompt in prompts)
        cache = _read_once(model, prompts[0][:-1], len(prompts)) if alike else None
        return cls(ids, mask, cache, pad, cache is not None and may_be_masked(model, cache))

    def then(self, rows: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]) -> DecodingState:
        """Return some of the rows, each up to a length, with more tokens behind: the rest of a row is masked."""
        device = self.ids.device
        chosen, ends = torch.tensor(rows, device=device), torch.tensor(lengths, device=device)
        mask = self.mask[chosen] * (torch.arange(self.ids.shape[1], device=device) < ends[:, None])
        if len(rows) < len(self.ids):
            self.cache.batch_select_indices(chosen)
        more = torch.tensor([list(tokens)], device=device).expand(len(rows), -1)
        ids, mask = torch.cat([self.ids[chosen], more], 1), torch.cat([mask, torch.ones_like(more)], 1)
        return replace(self, ids=ids, mask=mask)


@torch.inference_mode()
def draw(
    model: Any,
    state: DecodingState,
    numbers: Tensor,
    *,
    stops: Collection[int],
    longest: int,
    leave: float = LEAVE,
    watch: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Return what the model draws after each row by its numbers, with the token that ends it; `watch` is told of each token."""
    if not len(state.ids):
        return []
    rows, width = _Rows(numbers, stops, longest, watch), state.ids.shape[1]
    argument = cache_argument(GenerationMixin.prepare_inputs_for_generation)
    with evaluating(model):
        while going := [i for i, row in enumerate(rows.there) if not rows.is_complete(row)]:
            if len(going) < len(rows.there):
                chosen = torch.tensor(going, device=state.ids.device)
                state.ids, state.mask, rows.there = state.ids[chosen], state.mask[chosen], [rows.there[i] for i in going]
                try:
                    state.cache.batch_select_indices(chosen)
                except (AttributeError, NotImplementedError, TypeError):  # what the model keeps cannot be selected
                    state.cache, leave = None, 0.0
            rows.least = leave * len(rows.there)
            # a model's own generation settings would change its distribution; `rows` draws, and leaves one token to choose
            how = GenerationConfig(
                do_sample=False,
                repetition_penalty=1.0,
                eos_token_id=sorted(stops),
                pad_token_id=state.pad,
                max_new_tokens=longest + width - state.ids.shape[1],
                return_dict_in_generate=True,
            )
            with of_own_rows(model), without_empty(model):
                made = model.generate(
                    input_ids=state.ids,
                    attention_mask=state.mask,
                    generation_config=how,
                    logits_processor=LogitsProcessorList([rows]),
                    stopping_criteria=StoppingCriteriaList([_Leaving(rows)]),
                    **({} if state.cache is None else {argument: state.cache}),
                )
            state.ids, state.cache = made.sequences, cache_in(made)
            new = state.ids.shape[1] - state.mask.shape[1]
            state.mask = torch.cat([state.mask, state.mask.new_ones(len(state.mask), new)], 1)
    return rows.written


def _read_once(model: Any, beginning: Sequence[int], rows: int) -> Any:
    """Return the cache of a beginning that rows share; None where it cannot be repeated."""
    ids = torch.tensor([list(beginning)], device=next(model.parameters()).device)
    with without_empty(model):
        cache = cache_in(model(input_ids=ids, use_cache=True))
    try:
        cache.batch_repeat_interleave(rows)
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return cache


class _Rows(LogitsProcessor):
    """Rows being drawn; the scores allow only the token that each row draws next."""

    def __init__(self, numbers: Tensor, stops: Collection[int], longest: int, watch: Callable[[], None]) -> None:
        self.numbers, self.stops, self.longest, self.watch = numbers, stops, longest, watch
        self.written: list[list[int]] = [[] for _ in numbers]
        self.there, self.least = list(range(len(numbers))), 0.0

    def is_complete(self, row: int) -> bool:
        """Return True if a row has ended."""
        tokens = self.written[row]
        return bool(tokens) and (tokens[-1] in self.stops or len(tokens) >= self.longest)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Draw a token in every row."""
        places = [min(len(self.written[row]), self.longest - 1) for row in self.there]
        total = in_float64(scores.float().softmax(-1)).cumsum(-1)
        chosen = self.numbers[self.there, places].to(total.device)[:, None] * total[:, -1:]
        drawn = torch.searchsorted(total, chosen, right=True).clamp(max=scores.shape[1] - 1).to(scores.device)
        for row, token in zip(self.there, drawn[:, 0].tolist(), strict=True):
            if not self.is_complete(row):
                self.written[row].append(token)
        self.watch()
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


class _Leaving(StoppingCriteria):
    """Stop the call once so many rows have ended that the others should go on without them."""

    def __init__(self, rows: _Rows) -> None:
        self.rows = rows

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Tensor:
        """Report every row as ended once too few go on."""
        going = sum(not self.rows.is_complete(row) for row in self.rows.there)
        return torch.full((len(input_ids),), going < self.rows.least, device=input_ids.device)
