"""How large gradients are on this backbone: what penalties' declared strengths are scaled by, before any validation run.

Measured after the first task (plain LoRA, training data without the holdout), on the first ten optimizer steps' examples of the
second one, without dropout:

    example_gradient   g = rms over examples and factor entries of d l_n / d theta
    step_gradient      rms over B's entries of the mean gradient of a step, over ten steps
    sparsity_gradient  rms over B's entries of d |s B A|_1 / d B

    EWC balances the task loss where lambda g^2 d = g, with displacements d in proportion to the learning rate:  1 / (g lr)
    N-LoRA where lambda times the penalty's gradient equals the step's:  step_gradient / sparsity_gradient

The factor against the reference is rounded to a power of ten, so that it is a choice of decade and no tuning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import torch

from anchorlora.adapters import Scope
from anchorlora.constraints import EffectiveSparsity, protect
from anchorlora.continual.sequence import TaskSequence
from anchorlora.devices import in_float64
from anchorlora.study.selection import REFERENCE, Scaled

STEPS = 10


def factor(scaled: Scaled, gradients: dict[str, float], *, learning_rate: float) -> float:
    """The power of ten by which declared strengths are multiplied."""
    if scaled == "fisher":
        raw = REFERENCE.gradient * REFERENCE.learning_rate / (gradients["example_gradient"] * learning_rate)
    elif scaled == "sparsity":
        here = gradients["step_gradient"] / gradients["sparsity_gradient"]
        raw = here / (REFERENCE.step_gradient / REFERENCE.sparsity_gradient)
    else:
        return 1.0
    return 10.0 ** round(math.log10(raw))


def measured(sequence: TaskSequence) -> dict[str, float]:
    """The three gradients of a sequence that has not begun; learns its first task."""
    next(iter(sequence.stages()))
    scope, window = sequence.blocks.scope(), sequence.recipe.training.window
    factors = [site.factor(name) for site in scope.sites for name in ("A", "B")]
    losses = sequence.losses(sequence.order[1], window * STEPS)
    squares, steps, sums = 0.0, 0.0, [torch.zeros_like(p) for p in factors]
    examples = len(sequence.data.train[sequence.order[1]])
    count = min(window * STEPS, examples)
    for number, loss in enumerate(islice(losses, count), 1):
        gradients = torch.autograd.grad(loss, factors)
        squares += _mean_square(gradients)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient / window
        if number % window == 0:
            steps += _mean_square(sums[1::2])
            sums = [torch.zeros_like(p) for p in factors]
    return {
        "example_gradient": math.sqrt(squares / count),
        "step_gradient": math.sqrt(steps / max(1, count // window)),
        "sparsity_gradient": _sparsity(scope),
    }


def _sparsity(scope: Scope) -> float:
    parameters = [site.factor(name) for site in scope.sites for name in ("A", "B")]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    with protect(optimizer, scope, [EffectiveSparsity(1.0)]):
        optimizer.step()
    found = [site.factor("B").grad for site in scope.sites]
    optimizer.zero_grad()
    return math.sqrt(_mean_square([g for g in found if g is not None]))


def _mean_square(parts: Sequence[torch.Tensor]) -> float:
    """Mean over all entries of all parts."""
    return sum(float(in_float64(p).square().sum()) for p in parts) / sum(p.numel() for p in parts)
