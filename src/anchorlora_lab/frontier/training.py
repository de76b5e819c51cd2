"""How a row of the frontier trains: the library's own step, full weights as PEFT's OSF, or TRL's SDFT."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from anchorlora.adapters import lora_layers
from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.continual.batches import MicroBatch, Window, loss_named, windows
from anchorlora.continual.learn import Learner, Rules, learning
from anchorlora.data import Encoded
from anchorlora.errors import MissingExtra
from anchorlora.methods import METHODS
from anchorlora.models.packing import packed
from anchorlora.processes import accelerator_on
from anchorlora_lab.frontier.rows import OSF, PLAIN, SDFT, Row
from anchorlora_lab.frontier.subject import ROW_TOKENS, Subject

WINDOW, WARMUP, CLIP = 4, 4, 1.0
TOGETHER = 8  # prompts of a step of TRL's SDFT
START = 32  # new examples whose gradients start fold-16's block
QV = ("q_proj", "v_proj")


@dataclass(frozen=True)
class OwnTextDivergence(ProtectsPast):
    """Add the KL divergence of the model before to the model, per token, on chats that it wrote: one chat for each new example."""

    subject: Subject
    chats: Sequence[Encoded]
    strength: float
    first_task = 1
    requires = ()

    def begin_task(self, anchor: Any) -> ActiveConstraint:
        """Begin with the first chat."""
        return _Diverging(self)


class _Diverging(ActiveConstraint):
    def __init__(self, of: OwnTextDivergence) -> None:
        self.of, self.next = of, 0

    def loss(self, batch: MicroBatch, outputs: Any) -> Tensor:
        chats, subject = self.of.chats, self.of.subject
        row = subject.row([chats[(self.next + i) % len(chats)] for i in range(len(batch))])
        self.next += len(batch)
        with torch.no_grad(), subject.scaled(0.0):
            before = subject.logits(row).log_softmax(-1)
        now = subject.logits(row).log_softmax(-1)
        return self.of.strength * (before.exp() * (before - now)).sum(-1).mean()


def train(
    subject: Subject,
    row: Row,
    rate: float,
    examples: Sequence[Encoded],
    *,
    epochs: int,
    seed: int,
    own: int,
    human: Sequence[Encoded],
    most: int,
    at_epoch: Callable[[int, Mapping[str, float]], None],
) -> dict[str, Any]:
    """Train one row, beside so many of the model's own chats or what people wrote, where the row uses them.  Returns facts.

    Where the row learns from answers that the model writes, these have `most` tokens at most. `at_epoch` is called after every
    epoch, with the CPU seconds so far, which leave it out.
    """
    if row.method == OSF:
        return _train_full(subject, rate, examples, epochs=epochs, seed=seed, at_epoch=at_epoch)
    if row.method == SDFT:
        return _train_on_own_answers(subject, rate, examples, epochs=epochs, seed=seed, most=most, at_epoch=at_epoch)
    began, made, kept = time.process_time(), 0.0, 0
    method = METHODS[row.method]
    subject.open(QV if row.qv else "all-linear")
    memory: dict[str, Tensor] = {}
    cores: dict[str, Any] = {}
    layers = set(lora_layers(subject.model))
    paused = time.process_time()
    shown, use = list(human), "-human"
    if not row.old and (method.reads_past or "core" in method.requires):
        (shown, made), use = subject.own_encoded("cores", own), ""
    if method.reads_past:
        whole, seconds = subject.memory(shown, use)
        memory = {n: t for n, t in whole.items() if any(n.removesuffix("/tail").endswith(f"/{layer}") for layer in layers)}
        made += seconds
        kept += sum(t.numel() * t.element_size() for t in memory.values())
        if method.provided_cores is not None:
            cores = {name: part.core for name, part in method.provided_cores(memory).items()}
    elif "core" in method.requires:
        whole_cores, seconds = subject.cores(shown, use)
        cores, made = {name: whole_cores[name] for name in layers}, made + seconds
        kept += sum(4 * core.basis.numel() for core in cores.values())
    chats: list[Encoded] = []
    if row.own or row.kl:
        chats, seconds = subject.own_encoded("replay", own)
        made += seconds
    mixed = (row.own, chats) if row.own else (row.human, list(human))
    kept += sum(4 * (len(e.prompt) + len(e.answer)) for e in (mixed[1] if mixed[0] else chats))
    evaluating = time.process_time() - paused  # what is made once counts as it took then
    subject.open(QV if row.qv else "all-linear")
    stack = subject.stack
    method.plan.begin_task(stack, torch.Generator().manual_seed(seed), first=True)
    anchor = stack.anchor(cores=cores, past=memory, losses=subject.losses(examples))
    constraints: list[Any] = list(with_start(method).at(2)) if row.method != PLAIN else []
    if row.kl:
        constraints.append(OwnTextDivergence(subject, chats, row.kl))
    optimizer = torch.optim.AdamW(method.plan.param_groups(stack), lr=rate, weight_decay=row.weight_decay)
    steps = -(-len(examples) // WINDOW)

    def rehearsed(done: int, start: int, end: int) -> Sequence[Encoded]:
        share, rows = mixed
        return [rows[i % len(rows)] for i in range(int(share * (done + start)), int(share * (done + end)))]

    accelerator = accelerator_on(subject.device)
    torch.manual_seed(seed)
    learner = Learner(subject.model, accelerator.prepare_optimizer(optimizer), anchor, constraints, accelerator)
    rules = Rules(loss_named("example_mean", row.token_weights), clip_norm=CLIP, rate=lambda step: min(1.0, step / WARMUP))
    with learning(learner, rules) as training:
        for step, window in enumerate(_windows(subject, examples, epochs, seed, rehearsed), 1):
            training.step(window)
            if step % steps == 0:
                now = time.process_time()
                at_epoch(step // steps, {"training": now - began - evaluating, "made": made})
                subject.model.train()
                evaluating += time.process_time() - now
    stored = sum(4 * (f.A.numel() + f.B.numel()) for f in stack.newest().values())
    return {"stored_bytes": stored, "kept_bytes": kept, "parts": method.definition}


def _windows(
    subject: Subject,
    examples: Sequence[Encoded],
    epochs: int,
    seed: int,
    rehearsed: Callable[..., Any] = lambda *_: (),
) -> Iterator[Window]:
    orders, row_tokens = torch.Generator().manual_seed(seed), ROW_TOKENS if subject.unpacked is None else None
    for epoch in range(epochs):
        order = torch.randperm(len(examples), generator=orders).tolist()
        mixed = partial(rehearsed, epoch * len(examples))
        yield from windows(examples, order, size=WINDOW, micro=WINDOW, pad=subject.pad, rehearsed=mixed, row_tokens=row_tokens)


def _train_full(
    subject: Subject,
    rate: float,
    examples: Sequence[Encoded],
    *,
    epochs: int,
    seed: int,
    at_epoch: Callable[[int, Mapping[str, float]], None],
) -> dict[str, Any]:
    # as `train`: the same windows, warm-up, and clipping
    began, evaluating, steps, loss = time.process_time(), 0.0, -(-len(examples) // WINDOW), loss_named("example_mean")
    with subject.decomposed() as model:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        model.train()
        for step, window in enumerate(_windows(subject, examples, epochs, seed), 1):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, step / WARMUP)
            for batch in window.micro_batches:
                with packed(model, batch.layout, batch.kept):
                    outputs = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
                    loss(outputs.logits, batch, window).backward()
            torch.nn.utils.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            optimizer.zero_grad()
            if step % steps == 0:
                now = time.process_time()
                at_epoch(step // steps, {"training": now - began - evaluating, "made": 0.0})
                model.train()
                evaluating += time.process_time() - now
        stored = sum(4 * part.weight.numel() for part in model.modules() if hasattr(part, "osf_svd_params"))
    return {"stored_bytes": stored, "kept_bytes": 0, "parts": OSF}


def _train_on_own_answers(
    subject: Subject,
    rate: float,
    examples: Sequence[Encoded],
    *,
    epochs: int,
    seed: int,
    most: int,
    at_epoch: Callable[[int, Mapping[str, float]], None],
) -> dict[str, Any]:
    """Train as TRL's SDFT does: its loss, teacher (the base model), and words before the example; one answer a prompt."""
    try:
        from trl.experimental.sdft import SDFTConfig, SDFTTrainer
    except ImportError:
        raise MissingExtra(f"the row {SDFT} needs TRL with its trl.experimental.sdft, as 1.16 has it: pip install -U trl") from None
    from transformers import PrinterCallback, TrainerCallback

    began, evaluating = time.process_time(), 0.0

    class Measured(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal evaluating
            now = time.process_time()
            at_epoch(round(state.epoch), {"training": now - began - evaluating, "made": 0.0})
            subject.model.train()
            evaluating += time.process_time() - now

    subject.open("all-linear")
    METHODS[PLAIN].plan.begin_task(subject.stack, torch.Generator().manual_seed(seed), first=True)
    chat, rows = subject.tokenizer.chat_template, []
    for text, answer in ((e.example.sentence, e.example.label) for e in examples):
        prompt = [{"role": "user", "content": text}] if chat else f"{text}\n"
        rows.append({"prompt": prompt, "privileged_context": f"Example answer: {answer}" + ("" if chat else "\n")})
    steps = {"learning_rate": rate, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": WARMUP, "max_grad_norm": CLIP}
    sizes = {"per_device_train_batch_size": TOGETHER, "num_generations": 1, "max_completion_length": most}
    plain = {"bf16": False, "gradient_checkpointing": False, "use_cpu": True}
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with TemporaryDirectory() as folder:
        settings = SDFTConfig(folder, num_train_epochs=epochs, seed=seed, **steps, **sizes, **plain, **quiet)
        given = {"train_dataset": rows, "processing_class": subject.tokenizer, "callbacks": [Measured()]}
        trainer = SDFTTrainer(subject.model, settings, **given)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    stored = sum(4 * (f.A.numel() + f.B.numel()) for f in subject.stack.newest().values())
    return {"stored_bytes": stored, "kept_bytes": 0, "parts": SDFT}


def with_start(method: Any) -> Any:
    """Return a method whose start reads as many new examples as the bench has to spare."""
    parts = tuple(replace(part, examples=START) if type(part).__name__ == "GradientStart" else part for part in method.constraints)
    return replace(method, constraints=parts)
