"""Everything of the frontier that reaches into the library: a model with a block, its own text and cores, training, answers.

packed rows   of examples that share their beginning; padded where a model cannot read them
the block     rank 16, alpha 32, no dropout, on all linear layers or on q_proj and v_proj
scale c       the block's output times c: W + c dW; 0 is the model before, so it needs no second copy
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from peft import OSFConfig, get_peft_model
from torch import Tensor

from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.config import BaseModelSettings
from anchorlora.constraints import AnswerSensitivity
from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.continual.batches import MicroBatch, Window, loss_named, micro_batch, packed_row, rows_of, windows
from anchorlora.continual.evaluate import Scorer
from anchorlora.continual.learn import Learner, Rules, learning
from anchorlora.continual.losses import ExampleLosses
from anchorlora.data import Encoded, Example, read_samples
from anchorlora.data.templates import rendered
from anchorlora.devices import in_float64
from anchorlora.errors import MissingExtra
from anchorlora.features import read_cores
from anchorlora.features.files import read_tensors
from anchorlora.methods import METHODS
from anchorlora.models.cores_from_text import CoreRule, cores_of_samples
from anchorlora.models.load import LoadedModel, load_base_model
from anchorlora.models.own_text import own_text
from anchorlora.models.packing import packed, unpackable
from anchorlora.processes import accelerator_on
from anchorlora.store.tensors import write_tensors
from anchorlora_lab.frontier.rows import OSF, PLAIN, SDFT, Row

RANK, ALPHA, WINDOW, ROW_TOKENS, WARMUP, CLIP = 16, 32, 4, 1024, 4, 1.0
OWN_TOKENS = 40  # of each message of the model's own
TOGETHER = 8  # prompts of a step of TRL's SDFT
SENSITIVE = 32  # chats that are run backward for what answers depend on
START = 32  # new examples whose gradients start fold-16's block
CORES = CoreRule(rows=1024, energy=0.93, at_least=4, at_most=64, max_tokens=512, spread=True)  # as `anchorlora train` makes them
QV = ("q_proj", "v_proj")
SAMPLE = "Which words are these?"


@dataclass(eq=False)
class Subject:
    """A model of the bench, loaded once, that takes one block after another."""

    loaded: LoadedModel
    folder: Path  # where its own text and its cores are kept
    full: Any = None  # the model with PEFT's OSF in the block's place, while that trains
    device: torch.device = field(init=False)
    stack: AdapterStack = field(init=False)

    @classmethod
    def of(cls, name: str, folder: Path) -> Subject:
        """Load a model by name or folder, in float32 on the CPU."""
        settings = BaseModelSettings(model=name, dtype="float32", device="cpu", threads=1)
        return cls(load_base_model(settings), folder)

    def __post_init__(self) -> None:
        self.device, self.tokenizer = self.loaded.device, self.loaded.tokenizer
        self.stack = AdapterStack(self.loaded.model, targets="all-linear", rank=RANK, alpha=ALPHA)
        self.stack.open(torch.Generator().manual_seed(0))
        self.pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        sample = [self.encoded(0, SAMPLE, words) for words in ("one", "two and three", "four")]
        self.unpacked = unpackable(self.model, [e.prompt + e.answer for e in sample])

    @property
    def model(self) -> Any:
        """The adapted model."""
        return self.stack.model if self.full is None else self.full

    @cached_property
    def end(self) -> tuple[int, ...]:
        """The tokens that end an answer, as the chat template writes them."""
        if not self.tokenizer.chat_template:
            return (int(self.tokenizer.eos_token_id),)
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SAMPLE}]
        after = self.ids(rendered("a chat", turns, self.tokenizer, asking=False).rpartition(SAMPLE)[2])
        return after[:1]

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without any that the tokenizer would add."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, as the model's chat template writes it."""
        if not self.tokenizer.chat_template:
            return (int(self.tokenizer.bos_token_id or self.tokenizer.eos_token_id), *self.ids(f"{text}\n"))
        return self.ids(rendered("a prompt", [{"role": "user", "content": text}], self.tokenizer, asking=True))

    def encoded(self, index: int, prompt: str, answer: str) -> Encoded:
        """Return an example as tokens."""
        return Encoded(Example(index, prompt, answer), prompt, self.prompt(prompt), (*self.ids(answer), *self.end), False)

    def open(self, targets: str | Sequence[str]) -> None:
        """Put fresh adapters on the bare model."""
        if self.stack.targets != targets:
            base = self.model.unload()
            base.requires_grad_(False)
            self.stack = AdapterStack(base, targets=targets if targets == "all-linear" else tuple(targets), rank=RANK, alpha=ALPHA)

    @contextmanager
    def decomposed(self) -> Iterator[Any]:
        """Give the model with PEFT's OSF on all linear layers in the block; its weights stay as they are, beside what OSF adds."""
        base = self.stack.model.unload()
        base.requires_grad_(False)
        self.full = get_peft_model(base, OSFConfig(target_modules="all-linear"))
        if not any(hasattr(part, "_osf_U_low_init") for part in self.full.modules()):
            raise MissingExtra(f"the row {OSF} needs PEFT 0.21 or later, which keeps the model's weights: pip install -U peft")
        try:
            yield self.full
        finally:
            self.stack, self.full = AdapterStack(self.full.unload(), targets="all-linear", rank=RANK, alpha=ALPHA), None
            self.stack.open(torch.Generator().manual_seed(0))

    def repair(self) -> None:
        """Replace the block by what PEFT's reduce_intruder_dimension makes of it."""
        from peft.tuners.lora.intruders import reduce_intruder_dimension  # not in the oldest version that the library takes

        reduce_intruder_dimension(self.model, "default", "repaired", logging_sink=None)
        with torch.no_grad():
            for layer in lora_layers(self.model).values():
                for factors in (layer.lora_A, layer.lora_B):
                    factors["default"].weight.copy_(factors["repaired"].weight)
        self.model.set_adapter("default")
        self.model.delete_adapter("repaired")

    @contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """Multiply the block's output in the block."""
        if self.full is not None:
            with self.full.disable_adapter() if scale == 0 else nullcontext():
                yield
            return
        layers = [layer for layer in lora_layers(self.model).values() if "default" in layer.scaling]
        before = [layer.scaling["default"] for layer in layers]
        try:
            for layer, value in zip(layers, before, strict=True):
                layer.scaling["default"] = scale * value
            yield
        finally:
            for layer, value in zip(layers, before, strict=True):
                layer.scaling["default"] = value

    def norm(self) -> float:
        """Return the Frobenius norm of the whole update."""
        total = 0.0
        if self.full is not None:
            changes = (part.get_delta_weight("default") for part in self.full.modules() if hasattr(part, "osf_svd_params"))
            return float(sum(float(in_float64(change.detach()).square().sum()) for change in changes)) ** 0.5
        for f in self.stack.newest().values():
            total += f.scale**2 * float((in_float64(f.B.T @ f.B) * in_float64(f.A @ f.A.T)).sum())
        return total**0.5

    # reading

    def row(self, group: Sequence[Encoded]) -> MicroBatch:
        """Return examples as one forward pass."""
        return packed_row(group) if self.unpacked is None else micro_batch(group, pad=self.pad)

    def logits(self, batch: MicroBatch) -> Tensor:
        """Return the logits (answer tokens, vocabulary) of a forward pass."""
        with packed(self.model, batch.layout, batch.kept):
            outputs = self.model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
        return batch.answer_logits(outputs.logits).float()

    @torch.inference_mode()
    def log_probs(self, examples: Sequence[Encoded]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield forward passes over examples, in order, with log-probabilities (answer tokens, vocabulary)."""
        self.model.eval()
        for group in rows_of(examples, ROW_TOKENS):
            batch = self.row(group)
            yield batch, self.logits(batch).log_softmax(-1)

    def answers(self, prompts: Sequence[str], *, max_new_tokens: int) -> list[str]:
        """Return greedy answers."""
        packed = self.unpacked is None
        scorer = Scorer(self.model, self.tokenizer, max_new_tokens, 24, self.device, share_prefix=False, packed=packed)
        return [text.strip() for text in scorer.texts([self.prompt(text) for text in prompts])]

    def losses(self, examples: Sequence[Encoded]) -> ExampleLosses:
        """Return the losses of examples, for constraints that ask what answers or gradients depend on."""
        packed = self.unpacked is None
        return ExampleLosses(self.model, lambda count: examples[:count], self.device, packed=packed, pad=self.pad)

    # made once for a model

    def own(self, use: str, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """Return chats that the model wrote for a use, and the CPU seconds that they took; no two uses share any."""
        path = self.folder / f"own-{use}.json"

        def write() -> None:
            with self.scaled(0.0):
                seed = 1000 + ("cores", "replay", "held-out").index(use)
                rows = own_text(self.model, self.tokenizer, count=count, seed=seed, max_tokens=OWN_TOKENS)
            path.write_text(json.dumps(rows))

        seconds = made_once(path, write)
        return json.loads(path.read_text()), seconds

    def own_encoded(self, use: str, count: int) -> tuple[list[Encoded], float]:
        """Return the model's own chats as tokens."""
        rows, seconds = self.own(use, count)
        encoded = [
            Encoded(Example(i, "", ""), "", tuple(row["prompt_ids"]), tuple(row["completion_ids"]), False)
            for i, row in enumerate(rows)
        ]
        return encoded, seconds

    def memory(self, count: int) -> tuple[dict[str, Tensor], float]:
        """Return what the model's answers depend on, in its own chats, for all linear layers, and the CPU seconds."""
        path = self.folder / "memory.safetensors"
        encoded, own_seconds = self.own_encoded("cores", count)

        def write() -> None:
            self.open("all-linear")
            if "default" not in self.model.peft_config:
                self.stack.open(torch.Generator().manual_seed(0))
            with self.scaled(0.0):
                found = AnswerSensitivity(SENSITIVE).end_task(self.stack.anchor(losses=self.losses(encoded)))
            write_tensors(path, found)

        seconds = made_once(path, write)
        return dict(read_tensors(path)), own_seconds + seconds

    def cores(self, count: int) -> tuple[dict[str, Any], float]:
        """Return the cores of all linear layers as `anchorlora train` makes them, and the CPU seconds."""
        path = self.folder / "cores.safetensors"
        rows, own_seconds = self.own("cores", count)

        def write() -> None:
            self.open("all-linear")
            with self.scaled(0.0):
                made = cores_of_samples(self.model, self.tokenizer, list(read_samples(rows)), CORES, device=self.device)
            made.write(path)

        seconds = made_once(path, write)
        return dict(read_cores(path)), own_seconds + seconds


def made_once(path: Path, write: Callable[[], None]) -> float:
    """Let a file be written unless it is there; return the CPU seconds that writing it took.  One process writes, others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clock = path.with_name(f"{path.name}.seconds")
    with FileLock(f"{path}.lock"):
        if not clock.is_file():
            path.unlink(missing_ok=True)
            began = time.process_time()
            write()
            clock.write_text(repr(time.process_time() - began))
    return float(clock.read_text())


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
    if method.reads_past:
        whole, seconds = subject.memory(own)
        memory = {n: t for n, t in whole.items() if any(n.removesuffix("/tail").endswith(f"/{layer}") for layer in layers)}
        made += seconds
        kept += sum(t.numel() * t.element_size() for t in memory.values())
        if method.provided_cores is not None:
            cores = {name: part.core for name, part in method.provided_cores(memory).items()}
    elif "core" in method.requires:
        whole_cores, seconds = subject.cores(own)
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
