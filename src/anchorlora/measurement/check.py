"""Measure which conditions a method preserves, on a two-layer base model under several optimizers.

    displacement  |dA V| / |dA|      state  |A V| / |A|      delta_b  |dB| / |B|      response  rho = |dW V| / |dW|
    singular      the larger of |dW V_k| / |dW| and |U_k^T dW| / |dW|, where a method is about singular directions

A condition is preserved when no more is left of it than float32 storage explains; a frozen B must be bitwise equal.
Conditions that a method does not promise are measured too: a promise that nobody could break would be worth nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from anchorlora.adapters import AdapterStack, Anchor
from anchorlora.config import Features
from anchorlora.constraints import ProjectSingular
from anchorlora.constraints.base import end_task
from anchorlora.constraints.singular import directions_of
from anchorlora.continual.batches import windows
from anchorlora.continual.data import joining, remember
from anchorlora.continual.learn import Learner, Rules, learning
from anchorlora.continual.losses import ExampleLosses
from anchorlora.continual.past import Past
from anchorlora.continual.seeds import dropout_from, stream
from anchorlora.data import Encoded, EncodedExamples, Example
from anchorlora.measurement.drift import measure, storage_floor
from anchorlora.measurement.layers import FactorSquares
from anchorlora.methods import Method, TaskEnd
from anchorlora.processes import accelerator_on
from anchorlora.store.record import largest_zero

STEPS = 15
Groups = list[dict[str, Any]]
Optimizers = dict[str, Callable[[Groups], torch.optim.Optimizer]]

# steps large enough that what leaks stands far above rounding, small enough for the strongest penalty not to diverge
OPTIMIZERS: Optimizers = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.0),
    "adamw+decay": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
}


@dataclass(frozen=True)
class Finding:
    """One condition under one optimizer: the ratio that was measured, the largest that counts as zero, and the promise."""

    condition: str
    optimizer: str
    value: float
    allowed: float
    promised: bool

    @property
    def preserved(self) -> bool:
        """True if the value is no larger than rounding explains."""
        return self.value <= self.allowed


def check(method: Method, *, optimizers: Optimizers = OPTIMIZERS, seed: int = 42) -> list[Finding]:
    """Learn two small tasks with the method and measure the second one against the first one's core."""
    findings = []
    for name, make in optimizers.items():
        anchor, end = second_task(method, make, seed=seed)
        k = next((c.k for c in method.constraints if isinstance(c, ProjectSingular)), ProjectSingular.k)
        about = {"singular": on_singular(anchor, k)} if method.preserves.singular else {}
        for condition, (value, allowed) in (conditions(anchor, end) | about).items():
            findings.append(Finding(condition, name, value, allowed, getattr(method.preserves, condition)))
    return findings


def violation(findings: list[Finding]) -> list[Finding]:
    """Return the promised conditions that some optimizer violated."""
    return [f for f in findings if f.promised and not f.preserved]


def conditions(anchor: Anchor, end: Anchor) -> dict[str, tuple[float, float]]:
    """Condition -> (ratio, largest ratio that float32 storage explains), over all layers; the response at the task's very end."""
    factors = FactorSquares()
    for layer in anchor.layers:
        assert layer.core is not None
        factors += FactorSquares.of(layer.current, layer.start, layer.core)
    drift = measure(end)
    measured = {name: (c.value or 0.0, c.bound or 0.0) for name, c in factors.conditions().items()}  # undefined: nothing moved
    return {**measured, "response": (drift.rho or 0.0, drift.bound)}


def on_singular(anchor: Anchor, k: int) -> tuple[float, float]:
    """Share of the change on the k leading singular directions of the weights, of the worse side, and what rounding explains."""
    shares = []
    for side in ("A", "B"):
        on = size = floor = 0.0
        for layer in anchor.layers:
            directions = directions_of(layer, k)[side]
            change = layer.change() if side == "A" else layer.change().transposed()
            on, size = on + float(change.on(directions).norm()) ** 2, size + float(change.norm()) ** 2
            floor += storage_floor(layer.current, layer.start, k=k, d=directions.d) ** 2
        size = math.sqrt(size) or math.inf  # nothing moved
        shares.append((math.sqrt(on) / size, largest_zero(math.sqrt(floor) / size)))
    return max(shares, key=lambda share: share[0] / share[1])


def second_task(method: Method, optimizer: Callable[[Groups], torch.optim.Optimizer], *, seed: int) -> tuple[Anchor, Anchor]:
    """The anchor of the second of two tasks, after learning and after what the plan does at its end. The first is learned with
    AdamW.
    """
    with dropout_from(seed, "base_model"):
        model = tiny_backbone()
    blocks = AdapterStack(model, targets=("q_proj", "v_proj"), rank=8, alpha=32, dropout=0.1)
    past = Past.empty(Features(rows=128, held_out_rows=0, energy=0.93, at_least=4, at_most=20, wide=32))
    for task, make in ((1, OPTIMIZERS["adamw"]), (2, optimizer)):
        method.plan.begin_task(blocks, stream(seed, f"start/{task}"), first=task == 1)
        losses = partial(_losses, blocks, task, seed)
        anchor = blocks.anchor(cores=past.cores, wides=past.wides, past=past.remembered, losses=losses)
        with past.rows.collect(blocks.model):
            _learn(blocks, anchor, method, task, make, seed)
        if task == 2 and not getattr(method.plan, "rewrites", False):
            return anchor, anchor
        kept = {name: t for constraint in method.constraints for name, t in end_task(constraint, anchor).items()}
        cores, kept = past.made(kept, provided=method.provided_cores)
        end = TaskEnd(past.cores, past.protecting(cores), kept, stream(seed, f"end/{task}"))
        method.plan.end_task(blocks, end)
        past.append(cores, kept)
    return anchor, anchor.ending_at(blocks.factors())


def tiny_backbone() -> nn.Module:
    """Two Qwen3 layers of width 64 with random weights; draws from the global generator."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads))


def _learn(blocks: AdapterStack, anchor: Anchor, method: Method, task: int, optimizer: Callable, seed: int) -> None:
    optimizing, accelerator = optimizer(method.plan.param_groups(blocks)), accelerator_on(torch.device("cpu"))
    learner = Learner(blocks.model, optimizing, anchor, method.at(task), accelerator)
    examples, finished = _examples(task, seed), {"first": EncodedExamples(_examples(1, seed))} if task > 1 else {}
    join = joining(method.rehearsal, remember(method.rehearsal, finished, seed), seed, "second")
    with dropout_from(seed, f"dropout/{task}"), learning(learner, Rules()) as training:
        for window in windows(examples, range(len(examples)), size=8, micro=8, pad=1, rehearsed=join):
            training.step(window)


def _losses(blocks: AdapterStack, task: int, seed: int, count: int) -> Iterator[Tensor]:
    """Losses of single examples of a task."""
    examples = _examples(task, seed)
    return ExampleLosses(blocks.model, lambda many: examples[:many], torch.device("cpu"), pad=1)(count)


def _examples(task: int, seed: int) -> list[Encoded]:
    """Token strings in which one of four markers decides the answer; each task has tokens of its own."""
    draw, offset = stream(seed, f"tokens/{task}"), 20 * task
    examples = []
    for index in range(8 * STEPS):
        label = int(torch.randint(4, (), generator=draw))
        body = (torch.randint(8, (24,), generator=draw) + offset).tolist()
        body[5 * label] = offset + 8 + label
        examples.append(Encoded(Example(index, "", ""), "", tuple(body), (offset + 12 + label, 0), False))
    return examples
