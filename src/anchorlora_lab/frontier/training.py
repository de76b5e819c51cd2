"""How a row of the frontier trains: the library's own step, full weights as PEFT's OSF, or TRL's SDFT."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from anchorlora.models.packing import packed, rows_at_once
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
        return _ActiveDivergence(self)


class _ActiveDivergence(ActiveConstraint):
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


@dataclass
class Training:
    """A row's training at one rate: on what, for how long, and the clock that its points are told by."""

    subject: Subject
    row: Row
    rate: float
    seed: int
    examples: Sequence[Encoded]
    epochs: int
    own: int  # chats that the model writes, where the row uses any
    human: Sequence[Encoded]  # what people wrote, where the row uses it
    most: int  # tokens of an answer that the model writes, where the row learns from such answers
    at_epoch: Callable[[int, Mapping[str, float]], None]  # called after every epoch with the CPU seconds so far, which leave it out
    made: float = 0.0  # CPU seconds of the model's own text and of what is made of it
    left_out: float = 0.0  # CPU seconds that are not training's
    began: float = field(default_factory=time.process_time)

    def run(self) -> dict[str, Any]:
        """Train, and return facts."""
        return {OSF: self._train_full, SDFT: self._train_on_own_answers}.get(self.row.method, self._train_block)()

    def _end_epoch(self, epoch: int) -> None:
        now = time.process_time()
        self.at_epoch(epoch, {"training": now - self.began - self.left_out, "made": self.made})
        self.subject.model.train()
        self.left_out += time.process_time() - now

    def _train_block(self) -> dict[str, Any]:
        subject, row, method = self.subject, self.row, METHODS[self.row.method]
        subject.open(QV if row.qv else "all-linear")
        layers, paused = set(lora_layers(subject.model)), time.process_time()
        memory, cores, kept = self._past(layers)
        chats = self._chats("replay") if row.own or row.kl else []
        share, rehearsable = (row.own, chats) if row.own else (row.human, list(self.human))
        kept += sum(4 * (len(e.prompt) + len(e.answer)) for e in (rehearsable if share else chats))
        self.left_out = time.process_time() - paused  # what is made once counts as it took then
        subject.open(QV if row.qv else "all-linear")
        stack = subject.stack
        method.plan.begin_task(stack, torch.Generator().manual_seed(self.seed), first=True)
        anchor = stack.anchor(cores=cores, past=memory, losses=subject.losses(self.examples))
        constraints: list[Any] = list(with_start(method).at(2)) if row.method != PLAIN else []
        if row.kl:
            constraints.append(OwnTextDivergence(subject, chats, row.kl))
        optimizer = torch.optim.AdamW(method.plan.param_groups(stack), lr=self.rate, weight_decay=row.weight_decay)

        def rehearsed(done: int, start: int, end: int) -> Sequence[Encoded]:
            return [rehearsable[i % len(rehearsable)] for i in range(int(share * (done + start)), int(share * (done + end)))]

        accelerator = accelerator_on(subject.device)
        torch.manual_seed(self.seed)
        learner = Learner(subject.model, accelerator.prepare_optimizer(optimizer), anchor, constraints, accelerator)
        rules = Rules(loss_named("example_mean", row.token_weights), clip_norm=CLIP, rate=lambda step: min(1.0, step / WARMUP))
        with learning(learner, rules) as training:
            for window in self._windows(rehearsed):
                training.step(window)
        return {"stored_bytes": subject.stored_bytes, "kept_bytes": kept, "parts": method.definition}

    def _chats(self, use: str) -> list[Encoded]:
        chats, seconds = self.subject.own_encoded(use, self.own)
        self.made += seconds
        return chats

    def _past(self, layers: set[str]) -> tuple[dict[str, Tensor], dict[str, Any], int]:
        """The past that the row's method knows, for these layers: memory, cores, and their bytes."""
        subject, method = self.subject, METHODS[self.row.method]
        if not method.reads_past and "core" not in method.requires:
            return {}, {}, 0
        shown, use = (list(self.human), "-human") if self.row.old else (self._chats("cores"), "")
        if not method.reads_past:
            whole, seconds = subject.cores(shown, use)
            self.made += seconds
            cores = {name: whole[name] for name in layers}
            return {}, cores, sum(4 * core.basis.numel() for core in cores.values())
        known, seconds = subject.memory(shown, use)
        self.made += seconds
        memory = {n: t for n, t in known.items() if any(n.removesuffix("/tail").endswith(f"/{layer}") for layer in layers)}
        provided = method.provided_cores(memory) if method.provided_cores is not None else {}
        cores = {name: part.core for name, part in provided.items()}
        return memory, cores, sum(t.numel() * t.element_size() for t in memory.values())

    def _windows(self, rehearsed: Callable[..., Any] = lambda *_: ()) -> Iterator[Window]:
        """The windows of all epochs; an epoch ends once its last window has been trained on."""
        subject, orders = self.subject, torch.Generator().manual_seed(self.seed)
        how: dict[str, Any] = {"pad": subject.pad, "row_tokens": ROW_TOKENS if subject.packs else None}
        for epoch in range(self.epochs):
            order = torch.randperm(len(self.examples), generator=orders).tolist()
            mixed = partial(rehearsed, epoch * len(self.examples))
            yield from windows(self.examples, order, size=WINDOW, micro=rows_at_once(subject.model, WINDOW), rehearsed=mixed, **how)
            self._end_epoch(epoch + 1)

    def _train_full(self) -> dict[str, Any]:
        # as `_train_block`: the same windows, warm-up, and clipping
        loss = loss_named("example_mean")
        with self.subject.decomposed() as model:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=self.rate, weight_decay=0.0)
            model.train()
            for step, window in enumerate(self._windows(), 1):
                for group in optimizer.param_groups:
                    group["lr"] = self.rate * min(1.0, step / WARMUP)
                for batch in window.micro_batches:
                    with packed(model, batch.layout, batch.kept):
                        outputs = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
                        loss(outputs.logits, batch, window).backward()
                torch.nn.utils.clip_grad_norm_(trained, CLIP)
                optimizer.step()
                optimizer.zero_grad()
            stored = sum(4 * part.weight.numel() for part in model.modules() if hasattr(part, "osf_svd_params"))
        return {"stored_bytes": stored, "kept_bytes": 0, "parts": OSF}

    def _train_on_own_answers(self) -> dict[str, Any]:
        """Train as TRL's SDFT does: its loss, teacher (the base model), and words before the example; one answer a prompt."""
        try:
            from trl.experimental.sdft import SDFTConfig, SDFTTrainer
        except ImportError:
            raise MissingExtra(
                f"the row {SDFT} needs TRL with its trl.experimental.sdft, as 1.16 has it: pip install -U trl"
            ) from None
        from transformers import PrinterCallback, TrainerCallback

        self.began, subject, end_epoch = time.process_time(), self.subject, self._end_epoch

        class EndOfEpoch(TrainerCallback):
            def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                end_epoch(round(state.epoch))

        subject.open("all-linear")
        METHODS[PLAIN].plan.begin_task(subject.stack, torch.Generator().manual_seed(self.seed), first=True)
        chat, rows = subject.tokenizer.chat_template, []
        for text, answer in ((e.example.sentence, e.example.label) for e in self.examples):
            prompt = [{"role": "user", "content": text}] if chat else f"{text}\n"
            rows.append({"prompt": prompt, "privileged_context": f"Example answer: {answer}" + ("" if chat else "\n")})
        steps = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": WARMUP, "max_grad_norm": CLIP, "seed": self.seed}
        sizes = {"per_device_train_batch_size": TOGETHER, "num_generations": 1, "max_completion_length": self.most}
        plain = {"bf16": False, "gradient_checkpointing": False, "use_cpu": True}
        quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        with TemporaryDirectory() as folder:
            settings = SDFTConfig(folder, learning_rate=self.rate, num_train_epochs=self.epochs, **steps, **sizes, **plain, **quiet)
            given = {"train_dataset": rows, "processing_class": subject.tokenizer, "callbacks": [EndOfEpoch()]}
            trainer = SDFTTrainer(subject.model, settings, **given)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        return {"stored_bytes": subject.stored_bytes, "kept_bytes": 0, "parts": SDFT}


def with_start(method: Any) -> Any:
    """Return a method whose start reads as many new examples as the bench has to spare."""
    parts = tuple(replace(part, examples=START) if type(part).__name__ == "GradientStart" else part for part in method.constraints)
    return replace(method, constraints=parts)
