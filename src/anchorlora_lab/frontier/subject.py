"""A model of the frontier with a block: its own text, what old answers depend on, cores, answers and losses.

packed rows   of examples that share their beginning; padded where a model cannot read them
the block     rank 16, alpha 32, no dropout, on all linear layers or on q_proj and v_proj
scale c       the block's output times c: W + c dW; 0 is the model before, so it needs no second copy
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from peft import OSFConfig, get_peft_model
from torch import Tensor

from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.config import BaseModelSettings
from anchorlora.constraints import AnswerSensitivity
from anchorlora.continual.batches import MicroBatch, micro_batch, packed_row, rows_of
from anchorlora.continual.evaluate import Scorer
from anchorlora.continual.losses import ExampleLosses
from anchorlora.data import Encoded, Example, read_samples
from anchorlora.data.templates import render
from anchorlora.devices import in_float64
from anchorlora.errors import MissingExtra
from anchorlora.features import read_cores
from anchorlora.features.files import read_tensors
from anchorlora.models.cores_from_text import CoreRule, cores_of_samples
from anchorlora.models.load import LoadedModel, load_base_model
from anchorlora.models.own_text import own_text
from anchorlora.models.packing import packed, rows_at_once, unpackable
from anchorlora.store.tensors import write_tensors
from anchorlora_lab.frontier.rows import OSF

RANK, ALPHA, ROW_TOKENS = 16, 32, 1024
OWN_TOKENS = 40  # of each message of the model's own
SENSITIVE = 32  # chats that are run backward for what answers depend on
CORES = CoreRule(rows=1024, energy=0.93, at_least=4, at_most=64, max_tokens=512, spread=True)  # as `anchorlora train` makes them
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
        self.packs = unpackable(self.model, [e.prompt + e.answer for e in sample]) is None

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
        after = self.ids(render("a chat", turns, self.tokenizer, asking=False).rpartition(SAMPLE)[2])
        return after[:1]

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without any that the tokenizer would add."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, as the model's chat template writes it."""
        if not self.tokenizer.chat_template:
            return (int(self.tokenizer.bos_token_id or self.tokenizer.eos_token_id), *self.ids(f"{text}\n"))
        return self.ids(render("a prompt", [{"role": "user", "content": text}], self.tokenizer, asking=True))

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
        if self.full is not None:
            changes = (part.get_delta_weight("default") for part in self.full.modules() if hasattr(part, "osf_svd_params"))
            squares = [float(in_float64(change.detach()).square().sum()) for change in changes]
        else:
            blocks = self.stack.newest().values()
            squares = [f.scale**2 * float((in_float64(f.B.T @ f.B) * in_float64(f.A @ f.A.T)).sum()) for f in blocks]
        return sum(squares) ** 0.5

    @property
    def stored_bytes(self) -> int:
        """Bytes of the block's factors."""
        return sum(4 * (f.A.numel() + f.B.numel()) for f in self.stack.newest().values())

    # reading

    def row(self, group: Sequence[Encoded]) -> MicroBatch:
        """Return examples as one forward pass."""
        return packed_row(group) if self.packs else micro_batch(group, pad=self.pad)

    def logits(self, batch: MicroBatch) -> Tensor:
        """Return the logits (answer tokens, vocabulary) of a forward pass."""
        with packed(self.model, batch.layout, batch.kept):
            outputs = self.model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
        return batch.answer_logits(outputs.logits).float()

    @torch.inference_mode()
    def log_probs(self, examples: Sequence[Encoded]) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield forward passes over examples, in order, with log-probabilities (answer tokens, vocabulary)."""
        self.model.eval()
        for group in rows_of(examples, ROW_TOKENS if self.packs else rows_at_once(self.model, ROW_TOKENS)):
            batch = self.row(group)
            yield batch, self.logits(batch).log_softmax(-1)

    def answers(self, prompts: Sequence[str], *, max_new_tokens: int) -> list[str]:
        """Return greedy answers."""
        scorer = Scorer(self.model, self.tokenizer, max_new_tokens, 24, self.device, packed=self.packs)
        return [text.strip() for text in scorer.texts([self.prompt(text) for text in prompts])]

    def losses(self, examples: Sequence[Encoded]) -> ExampleLosses:
        """Return the losses of examples, for constraints that ask what answers or gradients depend on."""
        return ExampleLosses(self.model, lambda count: examples[:count], self.device, packed=self.packs, pad=self.pad)

    # made once for a model

    def own_encoded(self, use: str, count: int) -> tuple[list[Encoded], float]:
        """Return chats that the model wrote for a use, and the CPU seconds that they took; no two uses share any."""

        def write(path: Path) -> None:
            with self.scaled(0.0):
                seed = 1000 + ("cores", "replay", "held-out").index(use)
                rows = own_text(self.model, self.tokenizer, count=count, seed=seed, max_tokens=OWN_TOKENS)
            path.write_text(json.dumps(rows))

        path, seconds = made_once(self.folder / f"own-{use}.json", write)
        chats = [(tuple(row["prompt_ids"]), tuple(row["completion_ids"])) for row in json.loads(path.read_text())]
        return [Encoded(Example(i, "", ""), "", *tokens, False) for i, tokens in enumerate(chats)], seconds

    def memory(self, chats: Sequence[Encoded], use: str = "") -> tuple[dict[str, Tensor], float]:
        """Return what the model's answers to chats depend on, for all linear layers, and the CPU seconds."""

        def write(path: Path) -> None:
            self.open("all-linear")
            if "default" not in self.model.peft_config:
                self.stack.open(torch.Generator().manual_seed(0))
            with self.scaled(0.0):
                sensitivity = AnswerSensitivity(SENSITIVE).end_task(self.stack.anchor(losses=self.losses(chats)))
            write_tensors(path, sensitivity)

        path, seconds = made_once(self.folder / f"memory{use}.safetensors", write)
        return dict(read_tensors(path)), seconds

    def cores(self, chats: Sequence[Encoded], use: str = "") -> tuple[dict[str, Any], float]:
        """Return the cores of all linear layers as `anchorlora train` makes them of chats, and the CPU seconds."""

        def write(path: Path) -> None:
            self.open("all-linear")
            rows = [{"text": SAMPLE, "prompt_ids": list(e.prompt), "completion_ids": list(e.answer)} for e in chats]
            with self.scaled(0.0):
                made = cores_of_samples(self.model, self.tokenizer, read_samples(rows), CORES, device=self.device)
            made.write(path)

        path, seconds = made_once(self.folder / f"cores{use}.safetensors", write)
        return dict(read_cores(path)), seconds


def made_once(path: Path, write: Callable[[Path], None]) -> tuple[Path, float]:
    """Let a file be written unless it is there; return it, and the CPU seconds that it took.  One process writes, others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clock = path.with_name(f"{path.name}.seconds")
    with FileLock(f"{path}.lock"):
        if not clock.is_file():
            path.unlink(missing_ok=True)
            began = time.process_time()
            write(path)
            clock.write_text(repr(time.process_time() - began))
    return path, float(clock.read_text())
