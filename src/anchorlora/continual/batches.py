"""Micro-batches and windows: a window holds the examples of one optimizer step, a micro-batch those of one forward pass.

    padded  one row per example, padded on the left, so that the answers end together and logits are computed for a few positions
    packed  one row for all examples: what their prompts begin with, once, then each example's own tokens; turns of a chat, each of
            which goes on from the one before, are one text, which is read once

The task loss of a window, and what each micro-batch adds to it:

    example_mean  mean over examples of the mean over their answer tokens (the paper's micro-batch of one, accumulated)
    token_mean    mean over all answer tokens of the window (what transformers' Trainer takes): long labels weigh more

Each token's loss may have a weight, through which no gradient goes:

    dft    p, the probability of the token (dynamic fine-tuning, arXiv 2508.05629)
    eaft   entropy of the 20 likeliest tokens among themselves, over log 20 (entropy-adaptive fine-tuning, arXiv 2601.02151)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from anchorlora.data import Encoded
from anchorlora.features.layout import Layout, common_prefix, pack
from anchorlora.models.head import losses_in_chunks
from anchorlora.processes import ALONE, Processes

IGNORED = -100
T = TypeVar("T")
LIKELIEST = 20  # tokens whose entropy weights a token


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Examples of one forward pass: `inputs` (n, length)."""

    inputs: dict[str, Tensor]
    keep: int | Tensor  # what the model is told as `logits_to_keep`: a number of last positions, or the positions of a packed row
    targets: Tensor  # (n, longest answer), the answer tokens that are to be predicted; -100 elsewhere
    layout: Layout | None = None  # where the examples of a packed row are; None for padded rows
    places: tuple[str, ...] = ()  # where the examples come from, for messages
    remembered: Tensor | None = None  # (n,) true for examples of earlier tasks; None where there are none
    chats: tuple[int, ...] = ()  # of a packed row, the number of examples that each of its texts answers for
    learned: Tensor | None = None  # (n,) false for examples that add nothing to the task's loss; None where all do
    head: nn.Linear | None = None  # makes logits of what the model returns, where that is hidden states
    host: MicroBatch | None = None  # the same on the CPU, of one on another device, which need not be waited for then

    def __len__(self) -> int:
        return self.targets.shape[0]

    @property
    def kept(self) -> int | Tensor:
        """The same as `keep`, on the CPU."""
        return (self.host or self).keep

    @property
    def answered(self) -> tuple[Tensor, ...]:
        """Rows and columns of the answer tokens in `targets`."""
        places = ((self.host or self).targets != IGNORED).nonzero(as_tuple=True)
        return tuple(numbers.to(self.targets.device) for numbers in places)

    @property
    def positions(self) -> int:
        """Number of positions that logits are made of, known without asking the device."""
        return len(self) * self.keep if isinstance(self.keep, int) else len(self.keep)

    def to(self, device: torch.device) -> MicroBatch:
        """Return the batch on a device."""
        keep = self.keep if isinstance(self.keep, int) else self.keep.to(device)
        inputs = {k: v.to(device) for k, v in self.inputs.items()}
        remembered, learned = (None if mask is None else mask.to(device) for mask in (self.remembered, self.learned))
        host, targets = None if device.type == "cpu" else self, self.targets.to(device)
        return MicroBatch(inputs, keep, targets, self.layout, self.places, remembered, self.chats, learned, host=host)

    def answer_logits(self, logits: Tensor) -> Tensor:
        """Return the logits that predict the answer tokens, example by example."""
        if isinstance(self.keep, int):
            return logits[:, -self.keep : -1][self.answered]  # the last position predicts nothing
        return logits[0] if logits.shape[1] == len(self.keep) else logits[0, self.keep]

    def read_up_to(self, answered: Sequence[int]) -> list[Tensor]:
        """Return the places in a packed row of each example's prompt, and of so many tokens of its answer."""
        assert self.layout is not None
        assert isinstance(self.keep, Tensor)
        lengths = (self.targets != IGNORED).sum(1)
        lasts = self.keep[lengths.cumsum(0) - lengths].tolist()  # of each prompt
        starts = [start for start, chat in zip(self.layout.starts, self.chats, strict=True) for _ in range(chat)]
        beginning = torch.arange(self.layout.prefix)
        bounds = zip(starts, lasts, answered, strict=True)
        return [torch.cat([beginning, torch.arange(start, last + 1 + more)]) for start, last, more in bounds]


@dataclass(frozen=True, eq=False)
class Window:
    """The micro-batches of one optimizer step: all of them, or those of one process."""

    micro_batches: tuple[MicroBatch, ...]  # at least one, unless other processes have all examples
    examples: int  # of all processes, as the numbers below
    answer_tokens: int
    learned: int  # examples that the task's loss is a mean of
    empty: int = 0  # number of micro-batches at the end that count for nothing: a split model needs equally many in every process

    def __len__(self) -> int:
        return self.examples

    @property
    def full(self) -> int:
        """Number of micro-batches that count."""
        return len(self.micro_batches) - self.empty


def padded(rows: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Return model inputs with padding on the left; positions count from the first real token."""
    mask = left_padded([[1] * len(row) for row in rows], 0)
    return {"input_ids": left_padded(rows, pad), "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def left_padded(rows: Sequence[Sequence[int] | Tensor], filler: int) -> Tensor:
    """Return whole numbers as (n, longest), each row at the end of its own."""
    parts = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(parts, batch_first=True, padding_value=filler, padding_side="left")


def micro_batch(examples: Sequence[Encoded], *, pad: int) -> MicroBatch:
    """Return examples as the tensors of one forward pass."""
    targets = left_padded([e.answer for e in examples], IGNORED)
    inputs = padded([e.prompt + e.answer for e in examples], pad)
    return MicroBatch(inputs, targets.shape[1] + 1, targets, places=_places(examples), **_masks(examples))


def packed_row(examples: Sequence[Encoded], *, share: bool = True) -> MicroBatch:
    """Return examples as one packed row; turns of a chat that follow each other are one text in it, with an answer for each."""
    chats = list(_chats(examples)) if share else [[e] for e in examples]
    prefix = common_prefix([chat[0].prompt for chat in chats]) if share and len(chats) > 1 else 0
    layout, ids = pack([chat[-1].prompt + chat[-1].answer for chat in chats], prefix)
    keep = []  # the positions before the answers' tokens
    for chat, start in zip(chats, layout.starts, strict=True):
        keep += [torch.arange(len(e.answer)) + start - prefix + len(e.prompt) - 1 for e in chat]
    inputs = {"input_ids": torch.tensor([ids]), "position_ids": layout.positions()[None]}
    targets, sizes = left_padded([e.answer for e in examples], IGNORED), tuple(map(len, chats))
    return MicroBatch(inputs, torch.cat(keep), targets, layout, _places(examples), chats=sizes, **_masks(examples))


def _chats(examples: Sequence[Encoded]) -> Iterator[list[Encoded]]:
    """Examples in groups, in order: each continues the prompt and answer of the one before it in its group."""
    return group_items(examples, 1, lambda example, before: 0 if before is not None and example.goes_on_from(before) else 1)


def _masks(examples: Sequence[Encoded]) -> dict[str, Any]:
    remembered, learned = [e.remembered for e in examples], [e.learned for e in examples]
    of_learned = None if all(learned) else torch.tensor(learned)
    return {"remembered": torch.tensor(remembered) if any(remembered) else None, "learned": of_learned}


def _places(examples: Sequence[Encoded]) -> tuple[str, ...]:
    return tuple(e.example.place or f"example {e.example.index + 1}" for e in examples)


def group_items(items: Iterable[T], most: float, size: Callable[[T, T | None], float]) -> Iterator[list[T]]:
    """Yield items in groups, in order, whose sizes add up to no more than `most`, or of one item; a size is that of an item after
    the one before it in its group, if any.
    """
    group: list[T] = []
    total = 0.0
    for item in items:
        if group and total + size(item, group[-1]) > most:
            yield group
            group, total = [], 0.0
        total += size(item, group[-1] if group else None)
        group.append(item)
    if group:
        yield group


def rows_of(examples: Sequence[Encoded], most_tokens: int, *, share: bool = True) -> Iterator[Sequence[Encoded]]:
    """Return examples in groups for packed rows, in order; with `share`, what a chat's turns have in common counts once."""

    def tokens(example: Encoded, before: Encoded | None) -> int:
        own = len(example.prompt) + len(example.answer)
        if share and before is not None and example.goes_on_from(before):
            return own - len(before.prompt) - len(before.answer)
        return own

    return group_items(examples, most_tokens, tokens)


def nobody(start: int, end: int) -> Sequence[Encoded]:
    """Return no examples: the rehearsal of a method without memory."""
    return ()


def windows(
    examples: Sequence[Encoded],
    order: Sequence[int],
    *,
    size: int,
    micro: int,
    pad: int,
    rehearsed: Callable[[int, int], Sequence[Encoded]] = nobody,
    row_tokens: int | None = None,
    processes: Processes = ALONE,
) -> Iterator[Window]:
    """Yield the windows of one pass over the examples, or this process's part of each."""
    for start in range(0, len(order), size):
        end = min(start + size, len(order))
        new, old = [examples[i] for i in order[start:end]], rehearsed(start, end)
        chosen = [*new, *old]
        # prompts of different tasks share no beginning, so no packed row has both
        parts = [chosen] if row_tokens is None else [part for part in (new, old) if part]

        def groups(rank: int, parts: Sequence[Sequence[Encoded]] = parts) -> list[Sequence[Encoded]]:
            own = [[part[i] for i in processes.share(len(part), rank)] for part in parts]
            if row_tokens is not None:
                return [group for part in own for group in rows_of(part, row_tokens)]
            return [part[i : i + micro] for part in own for i in range(0, len(part), micro)]

        own_groups = groups(processes.rank)
        # a split model is gathered for every forward pass, in all processes
        most = max(len(groups(rank)) for rank in range(processes.count)) if processes.sharded else len(own_groups)
        empty = most - len(own_groups)
        made = [packed_row(group) if row_tokens is not None else micro_batch(group, pad=pad) for group in own_groups]
        made += [micro_batch(chosen[:1], pad=pad)] * empty
        learned = [len(example.answer) for example in chosen if example.learned]
        yield Window(tuple(made), len(chosen), sum(learned), len(learned), empty)


Loss = Callable[[Tensor, MicroBatch, Window], Tensor]
TokenWeight = Callable[[Tensor, Tensor], Tensor]  # logits (n, words) and losses (n,) of answer tokens -> weights (n,)


def probability_weight(logits: Tensor, losses: Tensor) -> Tensor:
    """Return the probability of each token: what the model finds unlikely is learned less."""
    return losses.neg().exp()


def entropy_weight(logits: Tensor, losses: Tensor) -> Tensor:
    """Return the entropy of the likeliest tokens as a share of its largest value: where the model is sure, less is learned."""
    likeliest = logits.topk(min(LIKELIEST, logits.shape[-1])).values.log_softmax(-1)
    return -(likeliest.exp() * likeliest).sum(-1) / math.log(likeliest.shape[-1])


def example_mean(logits: Tensor, batch: MicroBatch, window: Window, weight: TokenWeight | None = None) -> Tensor:
    """Return a micro-batch's share of the mean over examples of the mean over their answer tokens."""
    return example_losses(logits, batch, weight).sum() / window.learned


def example_losses(logits: Tensor, batch: MicroBatch, weight: TokenWeight | None = None) -> Tensor:
    """Return the mean over the answer tokens of each example, (n,)."""
    return _token_losses(logits, batch, weight).sum(1) / (batch.targets != IGNORED).sum(1)


def token_mean(logits: Tensor, batch: MicroBatch, window: Window, weight: TokenWeight | None = None) -> Tensor:
    """Return a micro-batch's share of the mean over all answer tokens of the window."""
    return _token_losses(logits, batch, weight).sum() / window.answer_tokens


MEANS = {"example_mean": example_mean, "token_mean": token_mean}
TOKEN_WEIGHTS: dict[str | None, TokenWeight | None] = {None: None, "dft": probability_weight, "eaft": entropy_weight}


def loss_named(mean: str, token_weights: str | None = None) -> Loss:
    """Return the loss of a recipe's settings."""
    return partial(MEANS[mean], weight=TOKEN_WEIGHTS[token_weights])


def _token_losses(logits: Tensor, batch: MicroBatch, weight: TokenWeight | None = None) -> Tensor:
    """Cross-entropy (n, longest answer) in float32, weighted, zero where there is no answer token. It is computed on flat rows
    (answer tokens, vocabulary): over a strided vocabulary, torch loses digits, and other positions would cost as much as the
    answers.
    """
    answered = batch.answered
    if batch.head is not None:
        losses = losses_in_chunks(batch.answer_logits(logits), batch.head, batch.targets[answered], weight)
    else:
        predicted = batch.answer_logits(logits).float()
        losses = torch.nn.functional.cross_entropy(predicted, batch.targets[answered], reduction="none")
        if weight is not None:
            losses = losses * weight(predicted.detach(), losses.detach())
    if batch.learned is not None:
        losses = losses * batch.learned[answered[0]]
    return losses.new_zeros(batch.targets.shape).index_put(answered, losses)
