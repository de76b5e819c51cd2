"""Losses of answer tokens in chunks: the logits of all of them never exist, in training or in scoring.

    p_i  probabilities (vocabulary,) of what follows hidden state h_i (d,)     W  head (vocabulary, d)
    loss_i = -log p_i[target_i]        d loss_i / d h_i = W^T (p_i - onehot(target_i))

A token's loss depends on its own hidden state alone, so the gradient, (n, d), is made with the loss, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anchorlora.adapters.kinds import is_heard
from anchorlora.devices import evaluating
from anchorlora.features.collector import not_collecting

CHUNK = 2**25  # logits that exist at once: 128 MiB in float32
LARGE = 2**26  # logits from which on they are made in chunks
SMALL = 2**14  # words; logits of fewer are left as they are


@contextmanager
def leaving_out(head: nn.Linear) -> Iterator[list[Tensor]]:
    """Let a model return the hidden states that its head would read, in place of logits; they are noted."""
    states: list[Tensor] = []

    def noted(hidden: Tensor) -> Tensor:
        states.append(hidden)
        return hidden

    head.__dict__["forward"] = noted
    try:
        yield states
    finally:
        del head.__dict__["forward"]


@contextmanager
def of_own_rows(model: Any) -> Iterator[None]:
    """Let a head in bfloat16 read copies of its rows: of a view, torch's CPU kernel copies the whole head for each row."""
    head = next((part.get_output_embeddings() for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def plain_head(model: nn.Module) -> nn.Linear | None:
    """Return the frozen linear head whose outputs are the logits; None if something else changes them, such as a soft cap."""
    reader = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    head: Any = None if reader is None else reader.get_output_embeddings()
    if type(head) is not nn.Linear or any(p.requires_grad or type(p) is not nn.Parameter for p in head.parameters()):
        return None
    if is_heard(head) or "forward" in head.__dict__ or head.out_features < SMALL:
        return None
    try:
        with evaluating(model), not_collecting(), leaving_out(head) as states:
            ids = torch.zeros(1, 2, dtype=torch.long, device=head.weight.device)
            logits = model(input_ids=ids, use_cache=False).logits
    except (RuntimeError, TypeError, ValueError):
        return None
    return head if len(states) == 1 and logits is states[0] else None


def token_scores(rows: Tensor, targets: Tensor, head: nn.Linear | None = None) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy (n,) in float32 of tokens, and the likeliest ones (n,), without gradients.

    `rows` are logits (n, vocabulary), of which a chunk is copied at a time, or hidden states (n, d) whose logits the head makes.
    """
    words = rows.shape[1] if head is None else head.out_features
    losses, likeliest = [], []
    for part, right in zip(*(x.split(max(1, CHUNK // words)) for x in (rows, targets)), strict=True):
        logits = (part if head is None else nn.functional.linear(part, head.weight, head.bias)).float()
        losses.append(nn.functional.cross_entropy(logits, right, reduction="none"))
        likeliest.append(logits.argmax(1))
    return torch.cat(losses), torch.cat(likeliest)


def losses_in_chunks(
    hidden: Tensor, head: nn.Linear, targets: Tensor, weight: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """Return the cross-entropy (n,) in float32 of tokens after hidden states (n, d), each times its weight, if any."""
    return _Losses.apply(hidden, head.weight, head.bias, targets, weight)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, W: Tensor, bias: Tensor | None, targets: Tensor, weight: Any) -> Tensor:
        """Return the losses, and keep the gradient of each with respect to its hidden state."""
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        gradients = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for rows in torch.arange(len(hidden)).split(max(1, CHUNK // len(W))):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = nn.functional.linear(hidden[part], W, bias).float()
            # an error in the sum of probabilities would add what all rows of W share, so the largest logit is taken off first
            logits -= logits.amax(1, keepdim=True)
            right, probabilities = targets[part, None], logits.exp()
            total = probabilities.sum(1, keepdim=True)
            losses[part] = (total.log() - logits.gather(1, right))[:, 0]
            factor = None if weight is None else weight(logits, losses[part])
            if factor is not None:
                losses[part] *= factor
            if gradients is None:
                continue
            probabilities.div_(total).scatter_add_(1, right, -torch.ones_like(total))
            if factor is not None:
                probabilities *= factor[:, None]
            gradients[part] = probabilities.to(W.dtype) @ W
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of the hidden states, (n, d)."""
        (gradients,) = ctx.saved_tensors
        return grad[:, None].to(gradients.dtype) * gradients, None, None, None, None
