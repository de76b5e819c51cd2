"""The whole training loop of one task; it does not know which method is running.

NaN and infinite values are found before the optimizer would write them into the factors.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import is_initialized
from torch import Tensor, nn
from torch.optim import Optimizer

from anchorlora.adapters import Anchor, lora_layers
from anchorlora.constraints import ActiveConstraint, Constraint, protect
from anchorlora.constraints.watch import CHECK_EVERY
from anchorlora.continual.batches import Loss, MicroBatch, Window
from anchorlora.continual.not_finite import StepAgain
from anchorlora.devices import generator_states
from anchorlora.errors import InvalidValue, NotFinite
from anchorlora.methods.adapter_plan import LR_RATIO
from anchorlora.models.head import LARGE, leaving_out, plain_head
from anchorlora.models.packing import packed
from anchorlora.processes import ALONE, Processes, adding_up, launched, refuse_other_launchers, sharding


def accelerator_on(device: torch.device) -> Accelerator:
    """Return Accelerate's view of a device, for a model that is there already.

    Once a process has an Accelerate state it stays, whatever device that names.
    """
    fresh = not is_initialized()
    # the recipe's dtype is what a record names, so a launcher's mixed precision plays no part
    precision = "no" if fresh else None
    return Accelerator(cpu=fresh and device.type == "cpu", mixed_precision=precision, device_placement=False)


def processes_on(device: torch.device) -> Processes:
    """Return the processes that a launcher has started for one run, connected; one by itself without a launcher."""
    refuse_other_launchers()
    if launched() == 1:
        return ALONE
    if device.index is not None:
        raise InvalidValue(f"{launched()} processes cannot all use {device}; leave the number out, or set device=auto")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # or transformers reads nothing in all processes but one
    accelerator = accelerator_on(device)
    return Processes(accelerator.process_index, accelerator.num_processes, accelerator.device, sharding())


def split(model: nn.Module, accelerator: Accelerator) -> None:
    """Split a base model over the processes (FSDP2), as the launcher's settings say; LoRA factors stay whole."""
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model

    state = accelerator.state
    if getattr(state, "fsdp_plugin", None) is None:  # Accelerate makes none on CPUs
        state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    state.fsdp_plugin.cpu_ram_efficient_loading = False  # every process has read the model
    factors = [part for layer in lora_layers(model).values() for part in (layer.lora_A, layer.lora_B)]
    state.fsdp_plugin.ignored_modules = factors
    fsdp2_prepare_model(accelerator, model)


def rate_at(step: int, *, schedule: str, warmup: float, steps: int) -> float:
    """Return the factor on the learning rate at a step of a task."""
    rising = round(warmup * steps)
    if step <= rising:
        return step / rising
    done = (step - 1 - rising) / (steps - rising)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


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
    processes: Processes = ALONE,
    rate: Callable[[int], float] = lambda step: 1.0,
) -> int:
    """Train on windows under constraints."""
    model.train()
    head = plain_head(model)
    watched = [*constraints, FiniteGradients()] if constraints else []  # else the gradients are those of the loss
    with adding_up(), protect(optimizer, anchor, watched, step=step, check_every=check_every) as held:
        restore()
        device = next(model.parameters()).device
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        rates = [(group, group["lr"] * group.get(LR_RATIO, 1.0)) for group in optimizer.param_groups]
        for number, window in enumerate(windows, step + 1):
            for group, peak in rates:
                group["lr"] = peak * rate(number)
            began, total = time.perf_counter(), 0.0
            gradients = partial(_gradients, model, window, loss=loss, held=held, accelerator=accelerator, head=head)
            again = StepAgain(model, anchor, window, loss, held, gradients, generator_states(device), processes)
            with naming_the_step(number, again.in_a_forward_pass):
                for i, batch in enumerate(window.micro_batches):
                    if i >= window.full:
                        model.eval()  # it gives no rows and draws no dropout
                    total += gradients(batch.to(device), counts=i < window.full)
            if window.empty:
                model.train()
            total = _add_up(trained, total, device, processes)
            if all(p.grad is None for p in trained):
                held.look(number - 1)  # the loss reaches other parameters
            with naming_the_step(number, again.in_the_whole_step):
                norm = gradient_norm(total, trained)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, clip_norm)
            optimizer.step()
            if held.step != number:
                held.look(number)  # nobody saw the step
            optimizer.zero_grad()
            penalties = _mean({name: value for h in held for name, value in h.readings().items()}, window, device, processes)
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


def _gradients(
    model: nn.Module,
    window: Window,
    batch: MicroBatch,
    *,
    loss: Loss,
    held: Sequence[ActiveConstraint],
    accelerator: Accelerator,
    head: nn.Linear | None = None,
    counts: bool = True,
) -> float:
    """Add the gradients of a micro-batch of a window.  Returns its share of the loss; zero if it does not count.

    Many logits are made in chunks, by a head that the model leaves out, unless a constraint reads them.
    """
    if head is not None and batch.positions * head.out_features > LARGE and not any(map(reads_outputs, held)):
        batch = replace(batch, head=head)
    with (
        packed(model, batch.layout, batch.keep) if batch.layout else nullcontext(),
        leaving_out(batch.head) if batch.head is not None else nullcontext(),
    ):
        outputs = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
        share = loss(outputs.logits, batch, window)
        extra = sum(h.loss(batch, outputs) for h in held) if counts else 0.0
        objective = share + extra * len(batch) / len(window)
        # inside, since activation checkpointing repeats forward passes in it
        accelerator.backward(objective if counts else 0.0 * objective)
    return float(share.detach()) if counts else 0.0


def reads_outputs(constraint: ActiveConstraint) -> bool:
    """Return True if a constraint adds to the loss, for which it may read the model's outputs."""
    return getattr(type(constraint), "loss", None) is not ActiveConstraint.loss


def _add_up(parameters: Sequence[nn.Parameter], loss: float, device: torch.device, processes: Processes) -> float:
    """Add up gradients over processes.  Returns the loss of the whole window."""
    if processes.count == 1:
        return loss
    there = torch.tensor([loss, *(float(p.grad is not None) for p in parameters)], device=device)
    for parameter in parameters:
        if parameter.grad is None:  # the window has fewer examples than there are processes
            parameter.grad = torch.zeros_like(parameter)
    processes.add_up([there, *(p.grad for p in parameters if p.grad is not None)])
    total, *counts = there.tolist()
    for parameter, processes_with_one in zip(parameters, counts, strict=True):
        if not processes_with_one:
            parameter.grad = None
    return float(total)


def _mean(readings: dict[str, float], window: Window, device: torch.device, processes: Processes) -> dict[str, float]:
    """Readings over the examples of all processes."""
    if processes.count == 1 or not readings:
        return readings
    own = sum(len(batch) for batch in window.micro_batches[: window.full]) / len(window)
    values = torch.tensor(list(readings.values()), device=device) * own
    processes.add_up([values])
    return dict(zip(readings, values.tolist(), strict=True))


def gradient_norm(loss: float, parameters: Sequence[nn.Parameter]) -> float:
    """Return the norm of the loss's gradient over all parameters."""
    norm = norm_of([p.grad for p in parameters if p.grad is not None])
    for what, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise NotFinite(f"the {what} is {value}")
    return norm


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all tensors together, on an accelerator in a few launches."""
    on_cpu = tensors[0].device.type == "cpu"
    return float(torch.stack([t.norm() for t in tensors] if on_cpu else torch._foreach_norm(list(tensors))).norm())


@contextmanager
def naming_the_step(step: int, where: Callable[[], str]) -> Iterator[None]:
    """Add the step to the message of a `NotFinite` that is raised in the block, and what was found to be its place."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite("; ".join(part for part in (f"{error} at step {step}", where()) if part)) from None


@dataclass(frozen=True)
class FiniteGradients:
    """Constrain nothing; listed last, stop a step whose gradients other constraints have made NaN or infinite."""

    first_task = 1
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Return the check of a task's gradients."""
        return _Looking(anchor)

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return nothing: later tasks need none of it."""
        return {}


class _Looking(ActiveConstraint):
    def __init__(self, anchor: Anchor) -> None:
        self.gradients = {(layer.name, name): layer.factor(name) for layer in anchor.layers for name in ("A", "B")}
        self.step = 0

    def begin(self, step: int) -> None:
        """Count from the step where training begins, for the message."""
        self.step = step

    def before_optimizer_step(self) -> None:
        """Raise NotFinite where a gradient that the optimizer would take is no number."""
        self.step += 1
        there = {factor: p.grad for factor, p in self.gradients.items() if p.grad is not None}
        if there and not math.isfinite(norm_of(list(there.values()))):
            layer, name = next((factor for factor, g in there.items() if not bool(torch.isfinite(g).all())), next(iter(there)))
            raise NotFinite(
                f"the gradient of {name} at {layer}, as constraints have made it, is NaN or infinite at step {self.step}"
            )
