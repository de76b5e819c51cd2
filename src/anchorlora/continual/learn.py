"""The whole training loop of one task; it does not know which method is running.

NaN and infinite values are found before the optimizer would write them into the factors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import is_initialized
from torch import Tensor, nn
from torch.optim import Optimizer

from anchorlora.adapters import Anchor
from anchorlora.constraints import ActiveConstraint, Constraint, protect
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.continual.batches import Loss, Window
from anchorlora.errors import NotFinite
from anchorlora.models.packing import packed


def accelerator_on(device: torch.device) -> Accelerator:
    """Return Accelerate's view of a device, for a model that is there already.

    Once a process has an Accelerate state it stays, whatever device that names.

    Args:
        device: Where the model is.
    """
    return Accelerator(cpu=device.type == "cpu" and not is_initialized(), device_placement=False)


def learn(
    model: nn.Module,
    optimizer: Optimizer,
    anchor: Anchor,
    constraints: Sequence[Constraint],
    windows: Iterable[Window],
    *,
    loss: Loss,
    accelerator: Accelerator,
    clip_norm: float | None = None,
    watch: Callable[[dict[str, Any]], None] = lambda event: None,
    step: int = 0,
    restore: Callable[[], None] = lambda: None,
    between: Callable[[int, Callable[[], None]], None] = lambda step, look: None,
    check_every: int = CHECK_EVERY,
) -> int:
    """Train on windows under constraints.

    Args:
        model: A PEFT model.
        optimizer: Over the parameters that train.
        anchor: The adapted layers as the task found them.
        constraints: What holds during training, in the order in which it acts.
        windows: One window per optimizer step; when training resumes, those after `step`.
        loss: Returns a micro-batch's share of its window's loss.
        accelerator: Runs the backward pass.
        clip_norm: Largest norm of the gradient; not clipped by default.
        watch: Called after each optimizer step with step (from 1), loss, learning_rate, seconds, grad_norm (of the loss, before
            penalties on factors are added) and penalties.
        step: Optimizer steps made before, when training resumes.
        restore: Called once the constraints hold, to load what was saved.
        between: Called after each step, outside it, with its number and a check of the constraints, for who saves.
        check_every: Steps between two checks of what protects the task.

    Returns:
        The number of parameters that trained.

    Raises:
        NotFinite: A loss, gradient or feature row is NaN or infinite; the step was not made.
        ProtectionLost: A condition that the constraints promise was violated.
    """
    model.train()
    watched = [*constraints, FiniteGradients()] if constraints else []  # else the gradients are those of the loss
    with protect(optimizer, anchor, watched, step=step, check_every=check_every) as held:
        restore()
        device = next(model.parameters()).device
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for number, window in enumerate(windows, step + 1):
            began, total = time.perf_counter(), 0.0
            for batch in window.micro_batches:
                batch = batch.to(device)
                with packed(model, batch.layout) if batch.layout else nullcontext():
                    with naming_the_step(number):  # rows are taken there
                        outputs = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
                    share = loss(outputs.logits, batch, window)
                    extra = sum(h.loss(batch, outputs) for h in held)
                accelerator.backward(share + extra * len(batch) / len(window))
                total += float(share.detach())
            if all(p.grad is None for p in trained):
                held.look(number - 1)  # the loss reaches other parameters
            norm = gradient_norm(total, trained, number)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, clip_norm)
            optimizer.step()
            if held.step != number:
                held.look(number)  # nobody saw the step
            optimizer.zero_grad()
            penalties = {name: value for h in held for name, value in h.readings().items()}
            watch(
                {
                    "step": number,
                    "loss": total,
                    "learning_rate": optimizer.param_groups[0]["lr"],
                    "seconds": time.perf_counter() - began,
                    "grad_norm": norm,
                    "penalties": penalties,
                }
            )
            between(number, partial(held.look, number))
    return sum(p.numel() for p in trained)


def gradient_norm(loss: float, parameters: Sequence[nn.Parameter], step: int) -> float:
    """Return the norm of the loss's gradient over all parameters.

    Args:
        loss: The loss of the window.
        parameters: What trains.
        step: The optimizer step, for the message.

    Raises:
        NotFinite: The loss or the norm is NaN or infinite.
    """
    norm = norm_of([p.grad for p in parameters if p.grad is not None])
    for what, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise NotFinite(f"the {what} is {value} at step {step}")
    return norm


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all tensors together, on an accelerator in a few launches.

    Args:
        tensors: At least one.

    Example:
        >>> from anchorlora.continual.learn import norm_of
        >>> norm_of([torch.tensor([3.0]), torch.tensor([[4.0]])])
        5.0
    """
    on_cpu = tensors[0].device.type == "cpu"
    return float(torch.stack([t.norm() for t in tensors] if on_cpu else torch._foreach_norm(list(tensors))).norm())


@contextmanager
def naming_the_step(step: int) -> Iterator[None]:
    """Add the step to the message of a `NotFinite` that is raised in the block.

    Args:
        step: The optimizer step, from 1.
    """
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{error} at step {step}") from None


@dataclass(frozen=True)
class FiniteGradients:
    """Constrain nothing; listed last, stop a step whose gradients other constraints have made NaN or infinite."""

    first_task = 1
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Return the check of a task's gradients.

        Args:
            anchor: The adapted layers.
        """
        return _Looking(anchor)

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return nothing: later tasks need none of it.

        Args:
            anchor: The adapted layers.
        """
        return {}


class _Looking(ActiveConstraint):
    def __init__(self, anchor: Anchor) -> None:
        self.gradients = {(layer.name, name): layer.factor(name) for layer in anchor.layers for name in ("A", "B")}
        self.step = 0

    def begin(self, step: int) -> None:
        self.step = step

    def before_optimizer_step(self) -> None:
        self.step += 1
        there = {place: p.grad for place, p in self.gradients.items() if p.grad is not None}
        if there and not math.isfinite(norm_of(list(there.values()))):
            layer, name = next((place for place, g in there.items() if not bool(torch.isfinite(g).all())), next(iter(there)))
            raise NotFinite(
                f"the gradient of {name} at {layer}, as constraints have made it, is NaN or infinite at step {self.step}"
            )
