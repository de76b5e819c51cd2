"""The task loss of a window and what each micro-batch adds to it.

    example_mean  mean over examples of the mean over their answer tokens (the paper's micro-batch of one, accumulated)
    token_mean    mean over all answer tokens of the window (what transformers' Trainer takes): long labels weigh more

A loss returns a micro-batch's share of the window's loss, so the shares of a window add up to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anchorlora.continual.batches import IGNORED, MicroBatch, Window

Loss = Callable[[Tensor, MicroBatch, Window], Tensor]


def example_mean(logits: Tensor, batch: MicroBatch, window: Window) -> Tensor:
    """logits (n, keep, vocabulary) -> scalar."""
    losses, counts = _token_losses(logits, batch), (batch.targets != IGNORED).sum(1)
    return (losses.sum(1) / counts).sum() / len(window)


def token_mean(logits: Tensor, batch: MicroBatch, window: Window) -> Tensor:
    """logits (n, keep, vocabulary) -> scalar."""
    return _token_losses(logits, batch).sum() / window.answer_tokens


LOSSES: dict[str, Loss] = {"example_mean": example_mean, "token_mean": token_mean}


def _token_losses(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Cross-entropy (n, keep - 1) in float32, zero where there is no answer token.  The last position predicts nothing.

    Computed on flat rows (answer tokens, vocabulary): over a strided vocabulary torch adds one word after another, which loses
    digits with every word, and other positions would cost as much as the answers.
    """
    answered = batch.targets != IGNORED
    predicted = logits[:, -batch.keep : -1][answered].float()
    losses = torch.nn.functional.cross_entropy(predicted, batch.targets[answered], reduction="none")
    return losses.new_zeros(answered.shape).masked_scatter(answered, losses)
