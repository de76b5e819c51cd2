"""The whole training loop of one task; it does not know which method is running.

NaN and infinite values are found before the optimizer would write them into the factors.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from anchorlora.adapters import Anchor
from anchorlora.constraints import ActiveConstraint, Constraint, innermost
from anchorlora.constraints.protect import Protection, enforcing
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.continual.batches import Loss, MicroBatch, Window, example_mean
from anchorlora.continual.not_finite import StepAgain
from anchorlora.devices import generator_states
from anchorlora.errors import NotFinite
from anchorlora.methods.adapter_plan import LR_RATIO
from anchorlora.models.head import LARGE, leaving_out, plain_head
from anchorlora.models.packing import packed
from anchorlora.processes import ALONE, Processes, adding_up


def rate_at(step: int, *, schedule: str, warmup: float, steps: int) -> float:
    """Return the factor on the learning rate at a step of a task."""
    rising = round(warmup * steps)
    if step <= rising:
        return step / rising
    done = (step - 1 - rising) / (steps - rising)
    falling = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return {**falling, "warmup_stable_decay": min(1.0, 5 * (1.0 - done))}[schedule]


@dataclass(frozen=True, eq=False)
class Learner:
    """A model that trains on one task, with the optimizer of its factors and what it must keep."""

    model: nn.Module
    optimizer: Optimizer
    anchor: Anchor  # its adapted layers as the task found them
    constraints: Sequence[Constraint]
    accelerator: Accelerator
    processes: Processes = ALONE  # those that train together


@dataclass(frozen=True)
class Rules:
    """How a task is trained, whatever method is running."""

    loss: Loss = example_mean
    clip_norm: float | None = None
    rate: Callable[[int], float] = lambda step: 1.0  # factor on the learning rate at a step, from 1
    check_every: int = CHECK_EVERY  # optimizer steps between two checks of what protects the task


@contextmanager
def learning(learner: Learner, rules: Rules, *, step: int = 0) -> Iterator[Training]:
    """Train a task while the block runs, under its constraints; `step` steps were made before, and are restored in the block."""
    learner.model.train()
    head, anchor = plain_head(learner.model), learner.anchor
    factors = {f"{name} at {layer.name}": layer.factor(name) for layer in anchor.layers for name in ("A", "B")}
    with (
        adding_up(),
        enforcing(learner.optimizer, anchor, learner.constraints, step=step, check_every=rules.check_every) as protection,
    ):
        training = Training(learner, rules, protection, head, number=step)
        if not learner.constraints:  # then the gradients are those of the loss, which is looked at
            yield training
            return
        # after the hooks of the constraints
        with innermost(learner.optimizer).register_step_pre_hook(lambda *_: refuse_wrong_gradients(factors, training.number)):
            yield training


class Training:
    """A task that trains: `step` makes one optimizer step, on the examples of one window."""

    def __init__(self, learner: Learner, rules: Rules, protection: Protection, head: nn.Linear | None, *, number: int = 0) -> None:
        self.learner, self.rules, self.protection, self.head, self.number = learner, rules, protection, head, number
        groups = learner.optimizer.param_groups
        self.device = next(learner.model.parameters()).device
        self.trained = [p for group in groups for p in group["params"] if p.requires_grad]
        self.peaks = [(group, group["lr"] * group.get(LR_RATIO, 1.0)) for group in groups]

    def step(self, window: Window) -> dict[str, Any]:
        """Make the next optimizer step.  Returns what callbacks are told of it."""
        began = time.perf_counter()
        model, optimizer, processes = self.learner.model, self.learner.optimizer, self.learner.processes
        self.number += 1
        for group, peak in self.peaks:
            group["lr"] = peak * self.rules.rate(self.number)
        again = StepAgain(
            *(model, self.learner.anchor, window, self.rules.loss, self.protection),
            backward=partial(self.gradients, window),
            states=generator_states(self.device),
            processes=processes,
        )
        shares: list[Tensor] = []
        with naming_the_step(self.number, again.in_a_forward_pass):
            for i, batch in enumerate(window.micro_batches):
                if i >= window.full:
                    model.eval()  # it gives no rows and draws no dropout
                share = self.gradients(window, batch.to(self.device), counts=i < window.full)
                shares += [share] * (i < window.full)
        if window.empty:
            model.train()
        shares = _add_up(self.trained, shares, self.device, processes)
        if all(p.grad is None for p in self.trained):
            self.look(self.number - 1)  # the loss reaches other parameters
        of_gradients = norm_of([p.grad for p in self.trained if p.grad is not None])
        with naming_the_step(self.number, again.in_the_whole_step):
            total, norm = finite_numbers(shares, of_gradients)
        if self.rules.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.trained, self.rules.clip_norm, of_gradients)
        optimizer.step()
        if self.protection.step != self.number:
            self.look()  # nobody saw the step
        optimizer.zero_grad()
        readings = {name: value for c in self.protection for name, value in c.readings().items()}
        return {
            "step": self.number,
            "loss": total,
            "learning_rate": optimizer.param_groups[0]["lr"],
            "seconds": time.perf_counter() - began,
            "grad_norm": norm,
            "penalties": _mean(readings, window, self.device, processes),
        }

    def look(self, step: int | None = None) -> None:
        """Check what protects the task, as after a step; by default the last one."""
        self.protection.look(self.number if step is None else step)

    def gradients(self, window: Window, batch: MicroBatch, *, counts: bool = True) -> Tensor:
        """Add the gradients of a micro-batch of a window, none if it does not count, and return its share of the loss. Many logits
        are made in chunks, by a head that the model leaves out, unless a constraint reads them.
        """
        model, head = self.learner.model, self.head
        if head is not None and batch.positions * head.out_features > LARGE and not any(map(reads_outputs, self.protection)):
            batch = replace(batch, head=head)
        with packed(model, batch.layout, batch.kept), nullcontext() if batch.head is None else leaving_out(batch.head):
            outputs = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
            share = self.rules.loss(outputs.logits, batch, window)
            extra = sum(c.loss(batch, outputs) for c in self.protection) if counts else 0.0
            objective = share + extra * len(batch) / window.learned
            # inside, since activation checkpointing repeats forward passes in it
            self.learner.accelerator.backward(objective if counts else 0.0 * objective)
        return share.detach()


def reads_outputs(constraint: ActiveConstraint) -> bool:
    """Return True if a constraint adds to the loss, for which it may read the model's outputs."""
    return getattr(type(constraint), "loss", None) is not ActiveConstraint.loss


def _add_up(parameters: Sequence[nn.Parameter], shares: list[Tensor], device: torch.device, processes: Processes) -> list[Tensor]:
    """Add up gradients over processes.  Returns what the loss of the whole window is the sum of."""
    if processes.count == 1:
        return shares
    loss = _sum(map(float, shares))
    counted = torch.tensor([loss, *(float(p.grad is not None) for p in parameters)], device=device)
    for parameter in parameters:
        if parameter.grad is None:  # the window has fewer examples than there are processes
            parameter.grad = torch.zeros_like(parameter)
    processes.add_up([counted, *(p.grad for p in parameters if p.grad is not None)])
    for parameter, processes_with_one in zip(parameters, counted[1:].tolist(), strict=True):
        if not processes_with_one:
            parameter.grad = None
    return [counted[0]]


def _mean(readings: dict[str, float], window: Window, device: torch.device, processes: Processes) -> dict[str, float]:
    """Readings over the examples of all processes."""
    if processes.count == 1 or not readings:
        return readings
    own = sum(len(batch) for batch in window.micro_batches[: window.full]) / len(window)
    values = torch.tensor(list(readings.values()), device=device) * own
    processes.add_up([values])
    return dict(zip(readings, values.tolist(), strict=True))


def finite_numbers(shares: Sequence[Tensor], norm: Tensor) -> tuple[float, float]:
    """Return the loss that shares add up to, and the norm of its gradient; one process asks its device for all of them at once."""
    alone = norm.device.type != "cpu" and len({type(norm), *map(type, shares)}) == 1
    *parts, of_gradients = torch.stack([*shares, norm]).tolist() if alone else map(float, (*shares, norm))
    loss = _sum(parts)
    for what, value in (("loss", loss), ("gradient norm", of_gradients)):
        if not math.isfinite(value):
            raise NotFinite(f"the {what} is {value}")
    return loss, of_gradients


def _sum(numbers: Iterable[float]) -> float:
    """Add numbers one after another: Python's own sum rounds otherwise from 3.12 on."""
    return reduce(operator.add, numbers, 0.0)


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together, on an accelerator in a few launches."""
    on_cpu = tensors[0].device.type == "cpu"
    return torch.stack([t.norm() for t in tensors] if on_cpu else torch._foreach_norm(list(tensors))).norm()


@contextmanager
def naming_the_step(step: int, where: Callable[[], str]) -> Iterator[None]:
    """Add the step to the message of a `NotFinite` that is raised in the block, and what was found to be its place."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite("; ".join(part for part in (f"{error} at step {step}", where()) if part)) from None


def refuse_wrong_gradients(factors: Mapping[str, Tensor], step: int) -> None:
    """Raise NotFinite where a gradient that the optimizer would take, as constraints have made it, is no number."""
    gradients = {name: p.grad for name, p in factors.items() if p.grad is not None}
    if gradients and not math.isfinite(float(norm_of(list(gradients.values())))):
        wrong = (name for name, g in gradients.items() if not bool(torch.isfinite(g).all()))
        first = next(wrong, next(iter(gradients)))
        raise NotFinite(f"the gradient of {first}, as constraints have made it, is NaN or infinite at step {step}")
